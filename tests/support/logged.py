"""What a Trainer logs, and a check that two runs log the same."""

import pytest
from transformers import TrainerCallback

# Parts of the names of what measures time.
NOT_METRICS = "_runtime", "_per_second", "step_time", "total_flos", "profiling"
REL, ABS = 2e-4, 2e-5
# A metric that is the difference of two others. log_odds_chosen is the difference of
# log p - log(1 - p), which is little more than log p.
DIFFERENCES = {
    "rewards/margins": ("rewards/chosen", "rewards/rejected"),
    "log_odds_chosen": ("logps/chosen", "logps/rejected"),
}
# A metric that says how often the difference of two others is positive.
SIGNS = {"rewards/accuracies": ("rewards/chosen", "rewards/rejected")}


class LossRecorder(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.seen.append(float(logs["loss"]))


def logged_steps(trainer, renamed=None):
    """Return the metrics that a trainer has logged at each step, without times."""
    renamed = renamed or {}
    steps = []
    for log in trainer.state.log_history:
        if "loss" not in log:
            continue
        metrics = {renamed.get(name, name): value for name, value in log.items()}
        for name in list(metrics):
            if any(part in name for part in NOT_METRICS):
                del metrics[name]
        steps.append(metrics)
    assert len(steps) == trainer.args.max_steps
    return steps


def assert_same_logs(patched, reference, except_=()):
    """Compare every metric of every step, the gradient's norm among them.

    fp32, two or three steps of Adam: the differences of single steps, some 1e-7, have not grown
    past 1e-4. Adam's first steps are as long for a gradient of 1e-7 as for one of 1. So after one
    of them a difference of two numbers is as exact as these two, and may be much less exact than
    its own size tells.
    """
    for i, (metrics, expected) in enumerate(zip(patched, reference, strict=True)):
        only_in_one = (metrics.keys() ^ expected.keys()) - set(except_)
        assert not only_in_one, f"logged by one alone: {only_in_one}"
        for name in metrics.keys() & expected.keys() - set(except_):
            if name in SIGNS and all(abs(expected[term]) <= ABS for term in SIGNS[name]):
                continue  # the policy is the reference still: signs of last digits
            size = sum(abs(expected[term]) for term in DIFFERENCES.get(name, ())) if i else 0
            message = f"{name} of step {i}: {metrics[name]}, without: {expected[name]}"
            bound = max(ABS, REL * size)
            assert metrics[name] == pytest.approx(expected[name], rel=REL, abs=bound), message
        assert metrics["grad_norm"] > 0
    assert reference[0]["grad_norm"] != reference[-1]["grad_norm"]
