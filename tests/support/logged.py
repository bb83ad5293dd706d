"""What a Trainer logs, and that two runs log the same."""

import pytest
from transformers import TrainerCallback

NOT_METRICS = "_runtime", "_per_second", "step_time", "total_flos", "profiling"  # of time
REL, ABS = 2e-4, 2e-5
TERMS = {  # of which one is subtracted from the other
    "rewards/margins": ("rewards/chosen", "rewards/rejected"),
    "log_odds_chosen": (
        "logps/chosen",
        "logps/rejected",
    ),  # of log p - log(1 - p), which is little more than log p
}
SIGNS = {
    "rewards/accuracies": ("rewards/chosen", "rewards/rejected")
}  # how often the difference of these is positive


class Losses(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.seen.append(float(logs["loss"]))


def steps(trainer, renamed=None):
    """What it has logged at each step, but for times."""
    renamed = renamed or {}
    seen = [
        {renamed.get(k, k): v for k, v in log.items()}
        for log in trainer.state.log_history
        if "loss" in log
    ]
    seen = [
        {k: v for k, v in log.items() if not any(part in k for part in NOT_METRICS)} for log in seen
    ]
    assert len(seen) == trainer.args.max_steps
    return seen


def compare(mine, theirs, except_=()):
    """Every number of every step, the gradient's norm among them.

    fp32, two or three steps of Adam: the differences of single steps, some 1e-7, have not grown
    past 1e-4. Adam's first steps are as long for a gradient of 1e-7 as for one of 1. So after one
    of them a difference of two numbers is as exact as these two, and may be much less exact than
    its own size tells."""
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert set(except_) >= set(a) ^ set(b), (
            f"logged by one alone: {set(a) ^ set(b) - set(except_)}"
        )
        for name in set(a) & set(b) - set(except_):
            if name in SIGNS and all(abs(b[term]) <= ABS for term in SIGNS[name]):
                continue  # the policy is the reference still: signs of last digits
            size = sum(abs(b[term]) for term in TERMS.get(name, ())) if i else 0
            message = f"{name} of step {i}: {a[name]}, without: {b[name]}"
            assert a[name] == pytest.approx(b[name], rel=REL, abs=max(ABS, REL * size)), message
        assert a["grad_norm"] > 0
    assert theirs[0]["grad_norm"] != theirs[-1]["grad_norm"]
