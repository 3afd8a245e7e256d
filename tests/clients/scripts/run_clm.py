"""Train a causal language model from scratch on a text file: Transformers' example of that name.

It is built as Transformers documents it: arguments by `HfArgumentParser`, texts by `datasets`, then
the `Trainer` trains, saves, evaluates and writes its metrics. It knows nothing of ebbtide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from datasets import load_dataset
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    model_type: str = field(metadata={"help": "a model type such as gpt2, trained from scratch"})
    tokenizer_name: str = field(metadata={"help": "a directory with a tokenizer"})
    config_overrides: str | None = field(default=None, metadata={"help": "n_embd=10,..."})


@dataclass
class DataTrainingArguments:
    train_file: str = field(metadata={"help": "a text file to train on"})
    validation_file: str = field(metadata={"help": "a text file to evaluate on"})
    block_size: int = field(default=128, metadata={"help": "tokens in a sequence"})


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw_datasets = load_dataset("text", data_files=files)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name)
    config = CONFIG_MAPPING[model_args.model_type]()
    if model_args.config_overrides is not None:
        config.update_from_string(model_args.config_overrides)
    model = AutoModelForCausalLM.from_config(config)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))

    def tokenize(examples: Any) -> Any:
        return tokenizer(examples["text"])

    def group_texts(examples: Any) -> Any:
        joined = {name: list(chain(*rows)) for name, rows in examples.items()}
        size = data_args.block_size
        total = len(joined["input_ids"]) // size * size
        result = {
            name: [tokens[at : at + size] for at in range(0, total, size)]
            for name, tokens in joined.items()
        }
        result["labels"] = result["input_ids"].copy()
        return result

    with training_args.main_process_first(desc="dataset map"):
        tokenized = raw_datasets.map(tokenize, batched=True, remove_columns=["text"])
        blocks = tokenized.map(group_texts, batched=True)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks["train"] if training_args.do_train else None,
        eval_dataset=blocks["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
