"""Jobs for ranks: LoRA adapters (PEFT) and supervised fine-tuning (TRL)."""

# pyright: reportMissingImports=false
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from bagua.interop.transformers import BaguaTrainerMixin
from tests.interop.fresh_state import as_launched
from tests.interop.tiny_models import VOCABULARY, tiny_bert, tiny_llama
from tests.interop.trainer_runs import Record, arguments, flat, gathered, make

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0}


class BaguaSFTTrainer(BaguaTrainerMixin, SFTTrainer):
    """What a user writes."""


def adapters(out: str, algorithm: str) -> Any:
    """Train adapters of a frozen model; save in the middle, and resume."""
    with as_launched():

        def model() -> Any:
            return get_peft_model(tiny_bert(), LoraConfig(target_modules=["query", "value"], **LORA))

        record, again = Record(), Record()
        trained = model()
        base = {name: param.detach().clone() for name, param in trained.named_parameters() if not param.requires_grad}
        count = sum(param.numel() for param in trained.parameters() if param.requires_grad)
        torch.manual_seed(3)
        trainer = make(out, algorithm, record, model=trained, save_strategy="steps", save_steps=3)
        trainer.train()
        unchanged = all(torch.equal(base[name], value) for name, value in trained.named_parameters() if name in base)
        other = make(out, algorithm, again, model=model())
        other.train(resume_from_checkpoint=f"{out}/checkpoint-3")
        return {
            "bytes": trainer.bagua_stats.total.bytes_sent,
            "steps": trainer.bagua_stats.steps,
            "trainable": count,
            "all": flat(trained).numel(),
            "unchanged": unchanged,
            "ranks": gathered(flat(trained)),
            "through": {step: record.losses[step] for step in (4, 5, 6)},
            "again": again.losses,
            "files": sorted(path.name for path in Path(out, "checkpoint-3").iterdir()),
        }


def tokenizer() -> Any:
    """Words w3 to w47, made here."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, VOCABULARY)}}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def fine_tune(out: str, algorithm: str | None, lora: bool) -> Any:
    """Supervised fine-tuning of a language model, perhaps with adapters; DDP without an `algorithm`."""
    with as_launched():
        record = Record()
        texts = [" ".join(f"w{3 + (5 * row + column) % 40}" for column in range(6)) for row in range(48)]
        given: dict[str, Any] = {} if algorithm is None else {"algorithm": algorithm}
        if lora:
            given["peft_config"] = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], **LORA)
        plain = arguments(out)
        config = SFTConfig(
            output_dir=out,
            use_cpu=True,
            bf16=False,
            max_length=16,
            dataset_num_proc=None,
            **{
                name: getattr(plain, name)
                for name in (
                    *("per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "max_steps"),
                    *("learning_rate", "logging_steps", "report_to", "disable_tqdm", "log_level"),
                )
            },
            save_strategy="no",
        )
        torch.manual_seed(3)
        kind = SFTTrainer if algorithm is None else BaguaSFTTrainer
        trainer = kind(
            tiny_llama(),
            config,
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=tokenizer(),
            callbacks=[record],
            **given,
        )
        trainer.train()
        stats = None if algorithm is None else trainer.bagua_stats
        return {
            "losses": record.losses,
            "norms": record.norms,
            "wrapped": type(trainer.model_wrapped).__name__,
            "bytes": 0 if stats is None else stats.total.bytes_sent,
            "trainable": sum(param.numel() for param in trainer.model.parameters() if param.requires_grad),
        }
