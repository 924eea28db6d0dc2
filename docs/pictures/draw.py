"""Draws the pictures of docs/concepts.md from what the allocator and the prefix cache really do.

``python docs/pictures/draw.py [DIRECTORY]`` writes them; a test compares those of the repository with what it draws.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from torch_paged_kv import BlockPool, PrefixCache

BLOCK_SIZE = 4
WIDTH = 520  # small enough to be read on a phone
CELL, HEIGHT, GAP = 37, 26, 12  # of a slot; between blocks
BLOCK = BLOCK_SIZE * CELL
BLUE, ORANGE, BOTH, FREE, NEW = "#cfe6f7", "#fbdcb2", "#d9cdea", "#eeeeee", "#c5e8d5"
LINE, TEXT = "#444444", "#111111"


@dataclass
class Picture:
    """Parts of an SVG, drawn downwards."""

    y: float = 8
    parts: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, words: str, *, size: int = 13, anchor: str = "start", bold: bool = False
    ) -> None:
        """A line of text whose base line is at ``y``."""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight}>{words}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, words: str = "", size: int = 12
    ) -> None:
        """A rectangle with text in its middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}" stroke="{LINE}"/>'
        )
        if words:
            self.text(x + width / 2, y + height / 2 + size * 0.35, words, size=size, anchor="middle")

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A straight line with a head."""
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{LINE}" stroke-width="1.5" '
            'marker-end="url(#head)"/>'
        )

    def block(self, x: float, y: float, slots: list[str], colour: str) -> None:
        """A block of slots; empty ones stay white, unless the block is free."""
        for place, word in enumerate(slots):
            self.box(x + place * CELL, y, CELL, HEIGHT, colour if word or colour == FREE else "#ffffff", word)

    def heading(self, words: str) -> None:
        """A line of bold text, and the space it needs."""
        self.y += 16
        self.text(8, self.y, words, bold=True)
        self.y += 8

    def svg(self, title: str) -> str:
        """The whole file."""
        height = self.y + 8
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img" '
            f'font-family="sans-serif" fill="{TEXT}">\n<title>{title}</title>\n<defs>{head}</defs>\n'
            f'<rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )


class Rows:
    """Two rows of a block table over a small pool, and the words in the pool's slots."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.block_table = torch.full((2, 4), -1, dtype=torch.int32)
        self.seq_lens = torch.zeros(2, dtype=torch.int32)
        self.slots = [""] * (num_blocks * BLOCK_SIZE)

    def write(self, *words: str) -> list[tuple[int, int]]:
        """Append words to each row; the pairs of blocks that were copied first."""
        tokens = [text.split() for text in words]
        spans = torch.tensor([0, len(tokens[0]), len(tokens[0]) + len(tokens[1])], dtype=torch.int32)
        slots, pairs = self.pool.allocate(self.block_table, self.seq_lens, spans, int(spans[-1]))
        copied = [(old, new) for old, new in pairs.tolist() if old >= 0]
        for old, new in copied:
            self.slots[new * BLOCK_SIZE : (new + 1) * BLOCK_SIZE] = self._block(old)
        for slot, word in zip(slots.tolist(), tokens[0] + tokens[1], strict=True):
            self.slots[slot] = word
        self.pool.check((self.block_table, self.seq_lens))
        return copied

    def _block(self, block: int) -> list[str]:
        return self.slots[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]

    def entries(self, row: int) -> list[int]:
        """The used part of a row of the table."""
        entries: list[int] = self.block_table[row, : -(-int(self.seq_lens[row]) // BLOCK_SIZE)].tolist()
        return entries

    def colour(self, block: int) -> str:
        """By the rows that hold a block."""
        holders = [row for row in (0, 1) if block in self.entries(row)]
        return BOTH if len(holders) == 2 else (BLUE, ORANGE)[holders[0]] if holders else FREE

    def draw_table(self, picture: Picture) -> None:
        """The block table, one line for each row."""
        for row in (0, 1):
            picture.text(8, picture.y + 18, f"row {row}, {int(self.seq_lens[row])} tokens")
            for column, block in enumerate(self.block_table[row].tolist()):
                colour = "#ffffff" if block < 0 else self.colour(block)
                picture.box(130 + column * CELL, picture.y, CELL, HEIGHT, colour, str(block))
            picture.y += HEIGHT

    def draw_pool(self, picture: Picture, columns: int = 3) -> dict[int, tuple[float, float]]:
        """Every block with its number, its words and its reference count; where each lies."""
        places = {}
        for block in range(self.pool.num_blocks):
            x, line = 8 + block % columns * (BLOCK + GAP), block // columns
            y = picture.y + line * (HEIGHT + 32) + 18
            count = int(self.pool.ref_counts[block])
            picture.text(
                x, y - 5, f"block {block}: " + (f"{count} holder{'s'[: count != 1]}" if count else "free"), size=12
            )
            picture.block(x, y, self._block(block), self.colour(block))
            places[block] = (x, y)
        picture.y += -(-self.pool.num_blocks // columns) * (HEIGHT + 32)
        return places


def blocks_and_table() -> str:
    """Two sequences, their table and the pool."""
    rows, picture = Rows(6), Picture()
    rows.write("The cat sat", "A bird sings in")
    rows.write("on the mat today", "May")
    for row, name in enumerate(("Row 0", "Row 1")):
        picture.heading(f"{name}: the tokens of a sequence, in its own order")
        words = [word for block in rows.entries(row) for word in rows._block(block)]
        for column, block in enumerate(rows.entries(row)):
            part = words[column * BLOCK_SIZE : (column + 1) * BLOCK_SIZE]
            picture.block(8 + column * (BLOCK + GAP), picture.y, part, rows.colour(block))
        picture.y += HEIGHT + 4
    picture.heading("block_table: which block of the pool each part lies in")
    rows.draw_table(picture)
    picture.heading("The pool: blocks are taken as tokens come")
    rows.draw_pool(picture)
    return picture.svg("Two sequences, the block table, and the blocks of the pool")


def copy_on_write() -> str:
    """A fork, and what the first different token copies."""
    rows, picture = Rows(6), Picture()
    rows.write("The cat sat on the mat", "")
    rows.pool.fork(rows.block_table, rows.seq_lens, torch.tensor([0]), torch.tensor([1]))
    picture.heading("After fork: row 1 is row 0, nothing was copied")
    rows.draw_table(picture)
    rows.draw_pool(picture)
    copied = rows.write("today", "again")
    picture.y += 6
    picture.heading("After a token more in each row: one block was copied")
    rows.draw_table(picture)
    places = rows.draw_pool(picture)
    for old, new in copied:
        (x, y), (to_x, to_y) = places[old], places[new]
        picture.arrow(x + BLOCK, y + HEIGHT / 2, to_x, to_y + HEIGHT / 2)
    return picture.svg("A fork shares its blocks; the block that both write into is copied")


def prefix_hash() -> str:
    """The chains of digests of two prompts that begin alike."""
    prompts = ["You are a kind guide in this town Where is north ?", "You are a kind guide in this town What is dusk ?"]
    picture, cache = Picture(), PrefixCache(tenant="alice")
    vocabulary = sorted({word for prompt in prompts for word in prompt.split()})
    known: set[bytes] = set()
    for number, prompt in enumerate(prompts):
        words = prompt.split()
        tokens: Tensor = torch.tensor([vocabulary.index(word) for word in words])
        picture.heading(f"Prompt {number + 1}")
        picture.y += 6
        for column in range(0, len(words), BLOCK_SIZE):
            part = words[column : column + BLOCK_SIZE]
            x = 8 + column // BLOCK_SIZE * (BLOCK + 28)
            digests = cache.digests(tokens, BLOCK_SIZE)
            whole = len(part) == BLOCK_SIZE
            digest = digests[column // BLOCK_SIZE] if whole else b""
            colour = "#ffffff" if not whole else BOTH if digest in known else NEW
            picture.block(x, picture.y, part + [""] * (BLOCK_SIZE - len(part)), colour)
            words_below = digest.hex()[:12] if whole else "not full: no digest"
            picture.text(x, picture.y + HEIGHT + 16, words_below, size=12)
            state = "" if not whole else "found: not computed again" if digest in known else "computed, then known"
            picture.text(x, picture.y + HEIGHT + 32, state, size=11)
            if column + BLOCK_SIZE < len(words) and len(words[column + BLOCK_SIZE :]) >= BLOCK_SIZE:
                picture.arrow(x + BLOCK + 2, picture.y + HEIGHT + 12, x + BLOCK + 26, picture.y + HEIGHT + 12)
            known |= {digest} if whole and number == 0 else set()
        picture.y += HEIGHT + 44
    return picture.svg("Each block's digest has that of the block before it in it")


PICTURES = {"blocks_and_table": blocks_and_table, "copy_on_write": copy_on_write, "prefix_hash": prefix_hash}


def main(directory: Path) -> None:
    """Write every picture."""
    for name, draw in PICTURES.items():
        (directory / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
