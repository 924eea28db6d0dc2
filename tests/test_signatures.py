"""One signature per op: the schema in csrc/ops.h, the registered op, the wrapper, the reference and the docs agree."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from op_schemas import ROOT, schema_texts

from torch_paged_kv import ops, reference

ANNOTATIONS = {
    "Tensor": "Tensor",
    "Optional[Tensor]": "Tensor | None",
    "List[Tensor]": "Sequence[Tensor]",
    "int": "int",
    "float": "float",
    "bool": "bool",
    "Optional[int]": "torch.dtype | None",  # ScalarType? is the only optional int
}


SCHEMAS: dict[str, Any] = {
    text.partition("(")[0]: torch._C.parse_schema(f"paged_kv::{text}") for text in schema_texts()
}


def signature_in_docs(schema: Any) -> str:
    """How docs/ops.md writes a signature; `!` marks what is written."""
    arguments, star = [], False
    for argument in schema.arguments:
        if argument.kwarg_only and not star:
            star = True
            arguments.append("*")
        written = "!" if argument.alias_info is not None and argument.alias_info.is_write else ""
        default = f"={argument.default_value}" if argument.has_default_value() else ""
        arguments.append(argument.name + written + default)
    returns = [value.name or str(value.type) for value in schema.returns]
    result = "None" if not returns else returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
    return f"{schema.name.removeprefix('paged_kv::')}({', '.join(arguments)}) -> {result}"


def test_every_op_has_a_wrapper_a_reference_and_docs() -> None:
    assert len(SCHEMAS) == 11
    assert sorted(ops.__all__) == sorted(SCHEMAS)
    headings = re.findall(r"^## `(\w+)`$", (ROOT / "docs" / "ops.md").read_text(), re.MULTILINE)
    assert headings == list(SCHEMAS)
    for name in SCHEMAS:
        assert callable(getattr(reference, name))
        assert getattr(ops, name).__doc__


@pytest.mark.parametrize("name", SCHEMAS)
def test_registered_schema(name: str) -> None:
    assert str(getattr(torch.ops.paged_kv, name).default._schema) == str(SCHEMAS[name])


@pytest.mark.parametrize("name", SCHEMAS)
def test_wrapper(name: str) -> None:
    parameters = list(inspect.signature(getattr(ops, name)).parameters.values())
    arguments = SCHEMAS[name].arguments
    assert [parameter.name for parameter in parameters] == [argument.name for argument in arguments]
    for parameter, argument in zip(parameters, arguments):
        assert (parameter.kind == inspect.Parameter.KEYWORD_ONLY) == argument.kwarg_only, argument.name
        assert (parameter.default is not inspect.Parameter.empty) == argument.has_default_value(), argument.name
        if argument.has_default_value():
            assert parameter.default == argument.default_value, argument.name
            assert type(parameter.default) is type(argument.default_value), argument.name
        assert parameter.annotation == ANNOTATIONS[str(argument.type)], argument.name


@pytest.mark.parametrize("name", SCHEMAS)
def test_reference(name: str) -> None:
    assert inspect.signature(getattr(reference, name)) == inspect.signature(getattr(ops, name))


@pytest.mark.parametrize("name", SCHEMAS)
def test_docs(name: str) -> None:
    section = re.search(rf"^## `{name}`$(.*?)(?=^## |\Z)", (ROOT / "docs" / "ops.md").read_text(), re.M | re.S)
    assert section is not None
    block = re.search(r"```text\n(.*?)```", section[1], re.S)
    assert block is not None
    assert re.sub(r"\s+", " ", block[1]).replace("( ", "(").replace(" )", ")").strip() == signature_in_docs(
        SCHEMAS[name]
    )


@pytest.mark.parametrize("name", SCHEMAS)
def test_docstring_names_every_argument(name: str) -> None:
    doc = getattr(ops, name).__doc__
    if name == "paged_attention_with_lse":
        doc += ops.paged_attention.__doc__ or ""
    for argument in SCHEMAS[name].arguments:
        assert re.search(rf"\b{argument.name}\b", doc), argument.name


def test_example_in_docs_runs() -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "ops.md").read_text(), re.S)
    assert example is not None
    names: dict[str, Any] = {}
    exec(example[1], names)
    assert names["out"].shape == (6, 8, 64)
    assert not names["out"].isnan().any()
    assert names["slot_mapping"].tolist() == [0, 1, 2, 3, 4, 16]
    assert (names["block_table"] == -1).all()
    assert names["counters"].tolist() == [2, 66, 0, 0]
