"""A training as a user of Lightning writes it, for `test_lightning`.

As a script it runs on two devices:

python lightning_training.py FOLDER_OF_THE_MODEL FOLDER_FOR_LOSSES auto|liger
"""

import json
import sys
from pathlib import Path

import lightning
import torch
from transformers import AutoModelForCausalLM

from liger_kernel.transformers import AutoLigerKernelForCausalLM

STEPS = 5
CLASSES = dict(auto=AutoModelForCausalLM, liger=AutoLigerKernelForCausalLM)


class Finetuning(lightning.LightningModule):
    def __init__(self, path, which):
        super().__init__()
        self.path = path
        self.which = which
        self.model = None
        self.losses = []

    def configure_model(self):
        if self.model is None:
            self.model = CLASSES[self.which].from_pretrained(self.path).train()

    def training_step(self, batch):
        out = self.model(**batch)
        assert (out.logits is None) == (self.which == "liger")
        self.losses.append(float(out.loss.detach()))
        return out.loss

    def validation_step(self, batch):
        out = self.model(**batch)
        predicted = out.logits[:, :-1].argmax(-1)
        self.log("val_loss", out.loss)
        self.log("val_accuracy", (predicted == batch["labels"][:, 1:]).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)


def make_loader(num_batches, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(2 * num_batches):
        ids = torch.randint(3, 30, (12,), generator=generator)
        rows.append(dict(input_ids=ids, labels=ids.where(ids > 5, -100)))
    return torch.utils.data.DataLoader(rows, batch_size=2)


def fit(path, which, folder, **options):
    """Train for `STEPS` steps. Returns (the Trainer, the module)."""
    lightning.seed_everything(0, verbose=False)
    module = Finetuning(path, which)
    trainer = lightning.Trainer(
        **{"accelerator": "cpu", "devices": 1, **options},
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        limit_val_batches=2,
        num_sanity_val_steps=0,
    )
    trainer.fit(
        module,
        make_loader(STEPS * trainer.world_size * trainer.accumulate_grad_batches),
        make_loader(2, seed=1),
    )
    return trainer, module


if __name__ == "__main__":
    path, folder, which = sys.argv[1:]
    accelerator = "gpu" if torch.cuda.device_count() > 1 else "cpu"
    trainer, module = fit(path, which, folder, accelerator=accelerator, devices=2, strategy="ddp")
    Path(folder, f"{which}_{trainer.global_rank}.json").write_text(json.dumps(module.losses))
