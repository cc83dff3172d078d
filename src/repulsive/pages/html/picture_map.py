"""Pictures with the attention of heads drawn over them. `picture_map.js` draws them, and `atlas.js` their atlas."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from repulsive.diagnostics.patches import PatchLayout
from repulsive.pages.data.pictures import LOWEST, PictureMaps, log_bytes, query_rows
from repulsive.pages.text import escaped, script_json, visible

BLOCKS = (1, 2, 3, 4, 6, 8)  # sides of the blocks of query patches
_LEAD = (
    "Select a patch of the picture to see what it attends to; the atlas follows. The colours show attention rollout: "
    "the product of all layers' attention, each averaged over heads and with the identity. It summarises attention and "
    "does not explain the output."
)

_SCALE = (
    '<p class="scale"><span>0</span><i class="ramp" aria-hidden="true"></i>'
    '<span><span id="picture-top">1</span> of the rollout</span></p>'
)


def picture_section(
    pictures: Sequence[PictureMaps], layout: PatchLayout, room: int, *, others: Sequence[PictureMaps] = ()
) -> str:
    """Render the pictures, their data and the controls.

    Args:
        pictures: at least one picture.
        layout: positions of patches and special tokens.
        room: bytes available. Queries are averaged in larger blocks, and then pictures left out, to fit.
        others: the same pictures with the attention of a second model.
    """
    shown = [list(sides) for sides in zip(pictures, others or pictures, strict=True)]
    shown = shown if others else [sides[:1] for sides in shown]
    while len(shown) > 1 and _size(shown, layout, 0) > room:
        shown.pop()
    block = next((block for block in BLOCKS if _size(shown, layout, block) <= room), 0)
    data = {
        "rows": layout.rows,
        "columns": layout.columns,
        "special": list(layout.special),
        "lowest": LOWEST,
        "block": block,
        "images": [_encoded(sides, layout, block) for sides in shown],
    }
    return (
        '<section id="pictures"><h2>Picture</h2>\n<noscript><p>The maps need JavaScript.</p></noscript>\n'
        '<div class="controls" id="picture-controls" hidden></div>\n'
        f'<div id="picture-stage" hidden>{_SCALE}</div>\n<p>{_LEAD}</p>\n{_notes(len(pictures), len(shown), block)}'
        f'<script type="application/json" id="picture-data">{script_json(data)}</script></section>\n'
    )


def picture_source(jpeg: bytes) -> str:
    """Encode a JPEG file as a data URL."""
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"


def _encoded(sides: Sequence[PictureMaps], layout: PatchLayout, block: int) -> dict[str, Any]:
    encoded = [
        {
            "rollout": _packed(query_rows(side.rollout, layout, block)),
            "layers": [None if x is None else _packed(query_rows(x, layout, block)) for x in side.layers],
        }
        for side in sides
    ]
    return {"name": visible(sides[0].name), "source": picture_source(sides[0].jpeg), "sides": encoded}


def _packed(weights: Tensor) -> str:
    return base64.b64encode(bytes(log_bytes(weights.cpu()).flatten().tolist())).decode()


def _size(pictures: Sequence[Sequence[PictureMaps]], layout: PatchLayout, block: int) -> int:
    """Bytes of the data of some pictures."""
    blocks = math.ceil(layout.rows / block) * math.ceil(layout.columns / block) if block else 0
    per_map = (1 + len(layout.special) + blocks) * layout.tokens
    maps = sum(1 + sum(len(x) for x in side.layers if x is not None) for sides in pictures for side in sides)
    files = sum(len(sides[0].jpeg) + 400 for sides in pictures)
    return math.ceil(4 / 3 * (maps * per_map + files)) + 4_000


def _notes(total: int, shown: int, block: int) -> str:
    notes = []
    if shown < total:
        notes.append(f"{total - shown} of {total} pictures are left out, to keep this file small.")
    if block == 0:
        notes.append("Single patches cannot be chosen as queries, to keep this file small.")
    elif block > 1:
        notes.append(f"Queries are means over {block} x {block} patches, to keep this file small.")
    return "".join(f'<p class="key">{escaped(note)}</p>\n' for note in notes)
