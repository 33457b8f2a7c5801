"""As sitecustomize.py of an environment: PyTorch answers that the processor has no AVX-512.

vLLM then loads its kernels for AVX2. `make test-avx2` puts it there, and takes it away again.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

QUESTIONS = (
    "_is_avx512_supported",
    "_is_avx512_bf16_supported",
    "_is_vnni_supported",
    "_is_amx_tile_supported",
    "_is_amx_fp16_supported",
)


class _Avx2Loader(Loader):
    """Loads torch.cpu, and answers its questions."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for question in QUESTIONS:
            setattr(module, question, lambda: False)


class _Avx2Finder(MetaPathFinder):
    """Finds torch.cpu, once; everything else is found as ever."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Avx2Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Avx2Finder())
