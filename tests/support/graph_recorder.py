"""A stand-in for what records CUDA graphs, for machines without a GPU."""

from types import SimpleNamespace

from liger_kernel.core import devices


class Recorder(devices.GraphRecorder):
    """Stands in for a GPU's: a replay calls the function again, which writes where it wrote."""

    def takes(self, x):
        return True

    def random_numbers(self, x):
        return 0

    def rehearse(self, function):
        function()

    def record(self, function):
        function()
        return SimpleNamespace(replay=function)
