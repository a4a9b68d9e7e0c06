"""Trains a Llama by Hugging Face's Trainer, which calls a model compiled by fxsched.

    python hf_trainer.py                     # in one process: workers are threads

The script is an ordinary one but for model.compile. The last batch of an epoch may be
smaller: ragged="fewer" runs it in fewer microbatches.
"""

import argparse

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from fxsched.models import docstrings

LENGTH = 64


def texts(functions):
    """The first bytes of each docstring; -100 marks what has no loss."""
    for each in functions:
        text = list(each.doc.strip().encode()[:LENGTH])
        rest = LENGTH - len(text)
        yield {
            "input_ids": text + [0] * rest,
            "attention_mask": [1] * len(text) + [0] * rest,
            "labels": text + [-100] * rest,
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rows", type=int, default=360, help="texts of an epoch")
    options = parser.parse_args()

    set_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    placed = {"schedule": options.schedule, "workers": options.workers}
    placed |= {"microbatches": options.microbatches, "ragged": "fewer"}
    model.compile(backend="fxsched", options=placed)

    functions = docstrings.library(docstrings.CODE_LENGTH, docstrings.DOC_LENGTH)
    arguments = TrainingArguments(
        output_dir="trained",
        num_train_epochs=2,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        max_grad_norm=1.0,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=4,
        report_to=[],
        use_cpu=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=list(texts(functions.train[: options.rows])),
        eval_dataset=list(texts(functions.held_out[:64])),
    )
    trainer.train()
    print(f"held-out loss {trainer.evaluate()['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
