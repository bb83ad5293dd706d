"""A cache manager for processes that compile the same kernels into one directory.

The directory may be on a network file system.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from triton.runtime.cache import FileCacheManager


class LigerTritonFileCacheManager(FileCacheManager):
    """Triton's cache manager, which writes each file beside its place and then renames it.

    A process never reads half a file, and two that write the same one do not disturb each other:
    each writes under a name of its own. The later file stays; both have the same content.
    """

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        """Write the file into the cache. Returns its path. ``binary=False`` if data is a string."""
        if not self.cache_dir:
            raise RuntimeError(
                "LigerTritonFileCacheManager: Triton could not make or find its cache directory"
            )
        data = data if isinstance(data, bytes) else str(data).encode()
        path = Path(self.cache_dir, filename)
        handle, temporary_path = tempfile.mkstemp(dir=self.cache_dir, prefix="tmp.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary_path, 0o666 & ~_umask())
            os.replace(temporary_path, path)
        except BaseException:
            Path(temporary_path).unlink(missing_ok=True)
            raise
        return str(path)


def _umask():
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def apply_liger_triton_cache_manager() -> None:
    """Let Triton use `LigerTritonFileCacheManager`, in this process and in those that it starts."""
    os.environ["TRITON_CACHE_MANAGER"] = f"{__name__}:{LigerTritonFileCacheManager.__name__}"
