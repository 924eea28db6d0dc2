"""pytest -p reference_only: as if this build had kernels for no device. Schemas are there, and the reference."""

import sys
import types

import torch
from op_schemas import schema_texts

_definitions = torch.library.Library("paged_kv", "DEF")
for _text in schema_texts():
    _definitions.define(_text)

_library = types.ModuleType("torch_paged_kv._library")
_library.load_libraries = lambda: None  # type: ignore[attr-defined]
sys.modules["torch_paged_kv._library"] = _library
