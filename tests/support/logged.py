"""What a Trainer logs."""

from transformers import TrainerCallback


class Losses(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.seen.append(float(logs["loss"]))
