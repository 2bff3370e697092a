"""The tiny models themselves: transformers loads them, and their greedy text has no near ties."""

import pytest
import torch


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "mixtral"])
def test_tiny_model_generates_without_ties(tiny_models, family):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_models(family)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Where is the station?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    out = model.generate(ids, max_new_tokens=48, output_scores=True, return_dict_in_generate=True, eos_token_id=None)
    top2 = torch.stack(out.scores)[:, 0].topk(2, dim=-1).values
    assert (top2[:, 0] - top2[:, 1]).min() > 1e-3
    assert len(set(out.sequences[0, ids.shape[1] :].tolist())) > 4  # not one token repeated


def test_tokenizer_round_trips_any_text(tiny_llama_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_folder)
    text = 'Größe 東京 🙂 {"a": [1, 2.5e-3]}\n\tdef f():'
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer.eos_token_id == 2
    assert tokenizer.pad_token_id == 0
    assert len(tokenizer) == 320


def test_tied_and_bf16_variants(make_tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model("llama", tmp_path / "tied", dtype=torch.bfloat16, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    out = model.generate(torch.tensor([[1, 50, 60]]), max_new_tokens=32, eos_token_id=None, pad_token_id=0)
    assert len(set(out[0].tolist())) > 4
