"""What runs in a peer's environment: same model, tokens and scheme as ours; prints its seconds, imports included."""

GPTQMODEL = """\
import sys, time
model, text, out, windows, length, group = *sys.argv[1:4], *map(int, sys.argv[4:7])
start = time.perf_counter()
from gptqmodel import GPTQModel, QuantizeConfig
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(model)
ids = tokenizer(open(text, encoding="utf-8").read(), add_special_tokens=False).input_ids[: windows * length]
rows = [{"input_ids": ids[i : i + length], "attention_mask": [1] * length} for i in range(0, len(ids), length)]
peer = GPTQModel.load(model, QuantizeConfig(bits=4, group_size=group, sym=True))
peer.quantize(rows, batch_size=4)
peer.save(out)
print("SECONDS", time.perf_counter() - start)
"""

LLMCOMPRESSOR = """\
import sys, time
model, text, out, windows, length, group = *sys.argv[1:4], *map(int, sys.argv[4:7])
start = time.perf_counter()
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(model)
ids = tokenizer(open(text, encoding="utf-8").read(), add_special_tokens=False).input_ids[: windows * length]
rows = [{"input_ids": ids[i : i + length], "attention_mask": [1] * length} for i in range(0, len(ids), length)]
weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
scheme = QuantizationScheme(targets=["Linear"], weights=weights)
loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
recipe = [GPTQModifier(config_groups={"g": scheme}, ignore=["lm_head"])]
data = Dataset.from_list(rows)
oneshot(model=loaded, dataset=data, recipe=recipe, max_seq_length=length, num_calibration_samples=windows)
loaded.save_pretrained(out, save_compressed=True)
print("SECONDS", time.perf_counter() - start)
"""

PEERS = {"gptqmodel": GPTQMODEL, "llmcompressor": LLMCOMPRESSOR}
