"""Pillow images as flat bytes and back, with all that a transform can see of them.

Pillow reads a file's header when an image is opened and its pixels when they are needed. Until then `thumbnail` and
`draft` may choose a smaller decoding, and some formats learn of their texts, palette or orientation later. So an image
that is not decoded yet, or whose other frames can still be asked for, is kept as its file, and opened anew for every
access; a decoded one is kept as its pixels and its attributes. What neither holds exactly is refused.

The attributes are plain values, written as JSON; their bytes (EXIF, colour profiles) stand behind the pixels.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

Form = list[Any]
"""How an image is built, as JSON."""

_MODES = frozenset(("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I",
                    "F", "I;16", "I;16L", "I;16B", "I;16N"))  # fmt: skip
"""Images that pixels and attributes describe."""

_APART = frozenset(("im", "_im", "pyaccess", "_mode", "_size", "palette", "_exif", "map"))
"""Attributes of a decoded image that are kept in a form of their own, or follow from it."""

_HANDLES = {
    "PIL.PngImagePlugin.PngImageFile": ("_fp",),
    "PIL.WebPImagePlugin.WebPImageFile": ("_decoder",),
}
"""What decoded images of a single frame need no longer, by class."""

_FILE_CLASS = re.compile(r"PIL\.[A-Za-z0-9]+ImagePlugin\.[A-Za-z0-9]+ImageFile")

_CURE = "return its copy() from the dataset, or convert it there"


class Unkept(Exception):
    """An image has something that cannot be kept; the text says what, and the cure."""


def image_form(image: Any) -> tuple[Form, bytes]:
    """(the form of a Pillow image, its bytes). The image stays as it is.

    Raises:
        Unkept: it cannot be kept exactly.
    """
    from PIL import Image, ImageFile

    kind = type(image)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind is Image.Image:
        return _decoded_form(image, "")
    if not isinstance(image, ImageFile.ImageFile) or not _FILE_CLASS.fullmatch(name):
        raise Unkept(f"is a {name}, a class that is not Pillow's own ({_CURE})")
    if image.tile or vars(image).get("_im", vars(image).get("im")) is None:
        return _file_form(image, name, "is not decoded yet", decoded=False)
    try:
        return _decoded_form(image, name)
    except Unkept as error:
        return _file_form(image, name, str(error), decoded=True)


def image_reader(form: Form) -> Callable[[Tensor], Any]:
    """What makes the image of its bytes (uint8, one dimension)."""
    made = _opened if form[0] == "file" else _from_pixels
    return lambda leaf: made(form, leaf.numpy().data)


class _Values:
    """Plain values as JSON, and the bytes in them, each once."""

    def __init__(self, start: int) -> None:
        self._end = start
        self._placed: dict[bytes, int] = {}

    def blob(self) -> bytes:
        """All bytes."""
        return b"".join(self._placed)

    def form(self, value: Any, where: str) -> Any:
        """The form of a value. Raises Unkept."""
        kind = type(value)
        if kind in _CONSTANTS:
            return value
        if kind in (bytes, bytearray):
            raw = bytes(value)
            start = self._placed.setdefault(raw, self._end)
            self._end = max(self._end, start + len(raw))
            return [kind.__name__, start, start + len(raw)]
        if kind in (tuple, list):
            if all(type(item) in _CONSTANTS for item in value):
                return [f"{kind.__name__} of constants", list(value)]
            return [kind.__name__, [self.form(item, f"{where}[{i}]") for i, item in enumerate(value)]]
        if kind is dict:
            return self.dict_form(value, lambda key: f"{where}[{key!r}]")
        return self._special_form(value, where)

    def dict_form(self, value: dict[Any, Any], where: Callable[[Any], str]) -> Form:
        """The form of a dict, whose values `where` names by their keys. Raises Unkept."""
        return ["dict", [[self.form(key, where(key)), self.form(item, where(key))] for key, item in value.items()]]

    def _special_form(self, value: Any, where: str) -> Form:
        """Pillow's own kinds of numbers and texts."""
        from PIL.PngImagePlugin import iTXt
        from PIL.TiffImagePlugin import IFDRational

        if type(value) is iTXt:
            return ["iTXt", str(value), *(self.form(getattr(value, part, None), where) for part in ("lang", "tkey"))]
        if type(value) is IFDRational and type(value.numerator) is int and type(value.denominator) is int:
            return ["IFDRational", value.numerator, value.denominator]
        raise Unkept(f"has {where} of type {type(value).__module__}.{type(value).__qualname__}")


_CONSTANTS = frozenset((type(None), bool, int, float, str))


def _value(form: Any, raw: memoryview) -> Any:
    """The value of a form, with containers of its own."""
    if type(form) is not list:
        return form
    kind, first = form[0], form[1]
    if kind == "tuple of constants":
        return tuple(first)
    if kind == "list of constants":
        return list(first)
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray)(raw[first : form[2]])
    if kind == "dict":
        return {_value(key, raw): _value(item, raw) for key, item in first}
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)(_value(item, raw) for item in first)
    if kind == "iTXt":
        from PIL.PngImagePlugin import iTXt

        return iTXt(first, *(_value(part, raw) for part in form[2:]))
    from PIL.TiffImagePlugin import IFDRational

    return IFDRational(first, form[2])


def _decoded_form(image: Any, name: str) -> tuple[Form, bytes]:
    """The form of an image by its pixels and attributes; `name`: of its class, empty for Pillow's plain one."""
    from PIL import Image

    if image.mode not in _MODES:
        raise Unkept(f"is a PIL.Image of mode {image.mode!r} (try image.convert('RGB'))")
    handles = _HANDLES.get(name, ()) if vars(image).get("n_frames", 1) == 1 else ()
    usual, skipped = vars(Image.Image()), _APART.union(handles)
    attributes = {
        attribute: value
        for attribute, value in vars(image).items()
        if attribute not in skipped and not (attribute in usual and usual[attribute] == value)
    }
    # Attributes before pixels: those are what may be refused, and reading pixels takes note of a new palette.
    palette, exif = _palette_state(image.palette), _exif_state(image._exif)
    for named in (attributes, {"palette": palette, "getexif()": exif}):
        _Values(0).dict_form(named, str)
    before = None if image.palette is None else dict(vars(image.palette))
    pixels, colors = image.tobytes(), None
    if image.mode in ("P", "PA"):
        mode = image.im.getpalettemode()
        colors = [mode, bytes(image.getpalette(mode))]
    if before is not None:
        vars(image.palette).update(before)
    values = _Values(len(pixels))
    kept = values.form([attributes, palette, colors, exif], "attributes")
    return ["pixels", name, image.mode, list(image.size), len(pixels), kept], pixels + values.blob()


def _from_pixels(form: Form, raw: memoryview) -> Any:
    from PIL import Image

    _, name, mode, size, pixel_bytes, kept = form
    image = Image.frombytes(mode, tuple(size), raw[:pixel_bytes])
    attributes, palette, colors, exif = _value(kept, raw)
    if colors is not None:
        image.putpalette(colors[1], colors[0])
        image.load()
    image.palette = _palette(palette)
    if name:
        made = _class(name)
        file = made.__new__(made)
        vars(file).update(vars(image))
        image = file
    vars(image).update(attributes)
    if exif is not None:
        image._exif = _exif(exif)
    return image


@lru_cache
def _class(name: str) -> Any:
    """One of Pillow's classes of image files."""
    module, _, found = name.rpartition(".")
    if not _FILE_CLASS.fullmatch(name):
        raise ValueError(f"{name} is no class of Pillow's")
    return getattr(importlib.import_module(module), found)


def _palette_state(palette: Any) -> dict[str, Any] | None:
    """A palette's attributes, without what follows from others."""
    if palette is None:
        return None
    state = dict(vars(palette))
    if state.get("_colors") is not None:
        again = _palette(state | {"_colors": None})
        if again.colors == state["_colors"]:
            state["_colors"] = None
    return state


def _palette(state: dict[str, Any] | None) -> Any:
    from PIL.ImagePalette import ImagePalette

    if state is None:
        return None
    palette = ImagePalette()
    vars(palette).update(state)
    return palette


def _exif_state(exif: Any) -> list[Any] | None:
    """EXIF data that somebody has asked for, and may have changed since: what they were read from, and the tags.

    Raises:
        Unkept: they were read from the image's file.
    """
    if exif is None:
        return None
    if exif._loaded_exif is None and exif._info is not None:
        raise Unkept("has EXIF data that are read from its file as they are asked for")
    return [exif._loaded, exif._loaded_exif, dict(sorted(exif.items())), exif._hidden_data, exif._ifds]


def _exif(state: list[Any]) -> Any:
    from PIL.Image import Exif

    loaded, source, tags, hidden, directories = state
    exif = Exif()
    if source is not None:
        exif.load(source)
        for tag in list(exif):
            del exif[tag]
    exif.update(tags)
    exif._loaded, exif._hidden_data, exif._ifds = loaded, hidden, directories
    return exif


def _file_form(image: Any, name: str, why: str, *, decoded: bool) -> tuple[Form, bytes]:
    """The form of an image that can be opened anew; `why` its pixels and attributes do not do."""
    file = vars(image).get("_fp") or image.fp
    try:
        place = file.tell()
        file.seek(0)
        raw = file.read()
        file.seek(place)
    except (AttributeError, OSError, ValueError):
        raise Unkept(f"is a {name} that {why}, and its file is closed ({_CURE})") from None
    values = _Values(len(raw))
    kept = values.form([image.tell(), decoded, image._exclusive_fp, image.filename], "attributes")
    form: Form = ["file", name, len(raw), kept]
    data = raw + values.blob()
    if not _same(image, _opened(form, memoryview(data)), decoded=decoded):
        raise Unkept(f"is a {name} that {why}, and is not what its file gives (changed, or another frame) ({_CURE})")
    return form, data


def _opened(form: Form, raw: memoryview) -> Any:
    from PIL import Image

    file_bytes, kept = form[2:]
    frame, decoded, exclusive, filename = _value(kept, raw)
    image = Image.open(io.BytesIO(raw[:file_bytes]))
    if frame:
        image.seek(frame)
    if decoded:
        image.load()
    file, mapped = image.fp, filename and len(image.tile) == 1 and image.tile[0][0] == "raw"
    if mapped and file is not None and not hasattr(image, "load_read") and not hasattr(image, "load_seek"):
        # Else Pillow would map the file of that name, which is the slow storage, if it is there at all.
        vars(image).update(load_read=file.read, load_seek=file.seek)
    vars(image).update(_exclusive_fp=exclusive, filename=filename)
    return image


_UNSEEN = frozenset(("im", "_im", "pyaccess", "fp", "_fp", "map", "png", "_decoder", "load_read", "load_seek", "_exif",
                     "_n_frames", "_is_animated"))  # fmt: skip
"""Attributes in which an image and the same one opened anew may differ: handles, and what is found when asked for."""


def _same(image: Any, again: Any, *, decoded: bool) -> bool:
    """Whether an image is what opening its file gave; `again` is of no use afterwards."""
    if type(image) is not type(again) or (not decoded and image.tell() != 0):
        return False
    one, other = ({name: item for name, item in vars(both).items() if name not in _UNSEEN} for both in (image, again))
    if one.keys() != other.keys() or not all(_equal(item, other[name]) for name, item in one.items()):
        return False
    if decoded and image.tobytes() != again.tobytes():
        return False
    if image._exif is None:
        return True
    exif = again.getexif()
    return dict(image._exif) == dict(exif) and all(
        exif.get_ifd(tag) == found for tag, found in image._exif._ifds.items()
    )


def _equal(one: Any, other: Any) -> bool:
    from PIL.ImagePalette import ImagePalette

    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return dict(one) == dict(other)
    if isinstance(one, ImagePalette):
        return _palette_state(one) == _palette_state(other)
    return one == other if isinstance(one, str | bytes | bytearray | int | float | tuple | list) else True
