"""Change what a saved file contains, with a checksum that is right, as anyone who makes a file can."""

import hashlib
import json

from safetensors.torch import save

from molaplace.saving.files import FORMAT, NO_CHECKSUM, decode


def read(path):
    """The document and the tensors of a saved file."""
    return decode(path.read_bytes(), path)


def write(path, document, tensors):
    """Write a document, which may contain infinity, and tensors."""
    text = json.dumps({"version": 1, **document, "sha256": NO_CHECKSUM})
    content = save(tensors, {FORMAT: text})
    path.write_bytes(content.replace(NO_CHECKSUM.encode(), hashlib.sha256(content).hexdigest().encode(), 1))


def edit(path, change):
    """Change the document and the tensors in place."""
    document, tensors = read(path)
    change(document, tensors)
    write(path, document, tensors)
