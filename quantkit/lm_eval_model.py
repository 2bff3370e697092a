"""Our engine as the model ``quantkit`` of lm-eval's own command.

lm-eval knows the models that are registered when its command starts and has no place where a package could announce
one, so ``quantkit-lm-eval`` (or ``python -m quantkit.lm_eval_model``) registers ours and then is that command:

    quantkit-lm-eval --model quantkit --model_args pretrained=FOLDER --tasks hellaswag
"""

from typing import Any

from lm_eval.api.registry import register_model

from quantkit.serve import Engine, EngineConfig
from quantkit.text_model import EngineTextModel
from quantkit_eval.lm_eval_adapter import ModelLM


@register_model("quantkit")
class QuantkitLM(ModelLM):
    """The engine behind lm-eval's ``--model quantkit``.

    Args:
        pretrained: hub id, folder, checkpoint or .gguf file.
        max_length: most tokens of a prompt and its continuation; None is what the model was made for.
        batch_size: lm-eval's; the engine batches by itself, so it acts on nothing.
        max_batch_size: likewise.
        device: ``auto``, ``cpu`` or ``cuda``; None and ``cuda:0``, which is lm-eval's default, are ``auto``.
        settings: further settings of `EngineConfig`.
    """

    def __init__(
        self,
        pretrained: str,
        max_length: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: Any = None,
        **settings: Any,
    ) -> None:
        chosen: Any = "auto" if device in (None, "cuda:0") else device
        config = EngineConfig(device=chosen, max_model_len=max_length, **settings)
        super().__init__(EngineTextModel(Engine(pretrained, config)))


def main() -> None:
    """Run lm-eval's command."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
