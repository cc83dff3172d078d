"""Let mkdocstrings show code under `Example:`, which our docstrings use; it only supports `Examples:`."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class CodeUnderExample(Extension):
    """Rename the heading `Example:` to `Examples:`."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rename the heading in the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
