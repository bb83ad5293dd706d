"""An HTTP endpoint for Prometheus, in the text exposition format 0.0.4."""

from __future__ import annotations

import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METRICS = {  # name -> (type, help)
    "liger_tokens_per_second": ("gauge", "Input tokens a second, without padding, all processes."),
    "liger_label_tokens_per_second": (
        "gauge",
        "Tokens a second that have a label, all processes.",
    ),
    "liger_mfu": ("gauge", "Model FLOPs utilisation: 1 is the devices' published peak."),
    "liger_hfu": ("gauge", "Hardware FLOPs utilisation: with the recomputation of checkpoints."),
    "liger_tflops_per_device": ("gauge", "Model TFLOP/s of a device."),
    "liger_peak_memory_bytes": ("gauge", "The most memory that a process has held."),
    "liger_loss": ("gauge", "Training loss."),
    "liger_learning_rate": ("gauge", "Learning rate."),
    "liger_grad_norm": ("gauge", "Norm of the gradients."),
    "liger_epoch": ("gauge", "Epochs done."),
    "liger_step": ("gauge", "Optimizer steps done."),
    "liger_tokens_total": ("counter", "Input tokens, without padding."),
    "liger_label_tokens_total": ("counter", "Tokens that have a label."),
    "liger_model_flops_total": ("counter", "Floating-point operations of the model."),
    "liger_training_seconds_total": ("counter", "Time of training, without evaluation and saving."),
}


def exposition(values: dict[str, float]) -> str:
    """Return the text for these values."""
    lines = []
    for name, (metric_type, description) in METRICS.items():
        if name in values:
            lines += [
                f"# HELP {name} {description}",
                f"# TYPE {name} {metric_type}",
                f"{name} {_format_number(values[name])}",
            ]
    return "".join(f"{line}\n" for line in lines)


def _format_number(value) -> str:
    value = float(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


class Endpoint:
    """``http://host:port/metrics``, served by a daemon thread until `close`.

    Args:
        port: 0 takes a free one, which ``endpoint.port`` and ``endpoint.url`` then have.
        host: the address to listen on. Only this machine sees 127.0.0.1; "" is every address.

    Raises:
        OSError: the port is taken, or not allowed.
    """

    def __init__(self, port: int, host: str = "127.0.0.1"):
        self._text = exposition({})
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path.partition("?")[0] in ("/", "/metrics"):
                    status, content_type = 200, CONTENT_TYPE
                    body = endpoint._text.encode()
                else:
                    status, content_type = 404, "text/plain"
                    body = b"It is /metrics.\n"
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                """Log nothing."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as problem:
            raise OSError(
                f"LigerMetrics: no endpoint at {host}:{port}: {problem}; give another port, or 0"
            ) from problem
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://{host or '0.0.0.0'}:{self.port}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="liger-metrics", daemon=True
        )
        self._thread.start()

    def update(self, values: dict[str, float]) -> None:
        self._text = exposition(values)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def values_of(report: dict[str, float], totals: dict[str, float], logs: dict) -> dict[str, float]:
    """Return the logged values under the endpoint's names."""
    values = {
        f"liger_{name}": value
        for name, value in (logs | report).items()
        if isinstance(value, (int, float))
    }
    if "peak_memory_gib" in report:
        values["liger_peak_memory_bytes"] = report["peak_memory_gib"] * 2**30
    values |= {
        "liger_tokens_total": totals["tokens"],
        "liger_model_flops_total": totals["model_flops"],
        "liger_training_seconds_total": totals["seconds"],
    }
    if totals["label_tokens"]:
        values["liger_label_tokens_total"] = totals["label_tokens"]
    return values
