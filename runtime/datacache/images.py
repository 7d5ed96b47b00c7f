"""Pillow's images and values as plain ones and back, with all that a transform can see of them.

Pillow reads a file's header when an image is opened and its pixels when they are needed. Until then `thumbnail` and
`draft` may choose a smaller decoding, and some formats learn of their texts, palette or orientation later. So an image
that is not decoded yet, or whose other frames can still be asked for, is kept as its file, and opened anew for every
access; a decoded one is kept as its pixels and its attributes. What neither holds exactly is refused.

Imported only where Pillow is.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable, Mapping
from typing import Any

from PIL import Image, ImageFile
from PIL.ImagePalette import ImagePalette
from PIL.PngImagePlugin import iTXt
from PIL.TiffImagePlugin import IFDRational

from runtime.datacache.unstorable import Unstorable

Check = Callable[[Any, str], object]
"""(value, its name); raises Unstorable unless it is a plain value."""

_MODES = frozenset(("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I",
                    "F", "I;16", "I;16L", "I;16B", "I;16N"))  # fmt: skip
"""Modes of images that pixels and attributes describe."""

_APART = frozenset(("im", "_im", "pyaccess", "_mode", "_size", "palette", "_exif", "map"))
"""Attributes of a decoded image that are kept apart from others, or follow from them."""

_HANDLES = {"PIL.PngImagePlugin.PngImageFile": ("_fp",), "PIL.WebPImagePlugin.WebPImageFile": ("_decoder",)}
"""Attributes that decoded images of a single frame no longer need, by class."""

_UNSEEN = frozenset(("im", "_im", "pyaccess", "fp", "_fp", "map", "png", "_decoder", "load_read", "load_seek", "_exif",
                     "_n_frames", "_is_animated"))  # fmt: skip
"""Attributes in which an image and the same one opened anew may differ: handles, and what is found when asked for."""

_FILE_CLASS = re.compile(r"PIL\.[A-Za-z0-9]+ImagePlugin\.[A-Za-z0-9]+ImageFile")

_HINT = "return its copy() from the dataset, or convert it there"


def plain_state(value: Any, check: Check) -> tuple[str, tuple[Any, ...]] | None:
    """Return (a key of `MAKE`, the arguments to call that with) for one of Pillow's values, else None.

    Raises:
        Unstorable: the value cannot be kept exactly; the text says why and what to do, but not of which value.
    """
    kind = type(value)
    if kind is iTXt:
        return "iTXt", (str(value), getattr(value, "lang", None), getattr(value, "tkey", None))
    if kind is IFDRational and type(value.numerator) is int and type(value.denominator) is int:
        return "IFDRational", (value.numerator, value.denominator)
    if not isinstance(value, Image.Image):
        return None
    name = f"{kind.__module__}.{kind.__qualname__}"
    own_file = isinstance(value, ImageFile.ImageFile) and _FILE_CLASS.fullmatch(name)
    if kind is not Image.Image and not own_file:
        raise Unstorable(f"is a {name}, a class that is not Pillow's own ({_HINT})")
    if own_file and (value.tile or vars(value).get("_im", vars(value).get("im")) is None):  # type: ignore[attr-defined]
        return "file", _file_state(value, name, "that is not decoded yet", decoded=False)
    try:
        return "pixels", (_pixel_state(value, name if own_file else "", check),)
    except Unstorable as error:
        if own_file:
            return "file", _file_state(value, name, f"whose {error}", decoded=True)
        raise Unstorable(f"is a {name} whose {error}") from None


def _pixel_state(image: Any, name: str, check: Check) -> dict[str, Any]:
    """Return a decoded image as plain values; `name`: its class, empty for Pillow's plain one."""
    if image.mode not in _MODES:
        raise Unstorable(f"mode is {image.mode!r} (try image.convert('RGB'))")
    exif = image._exif
    if exif is not None and exif._loaded_exif is None and exif._info is not None:
        raise Unstorable("EXIF data are read from its file as they are asked for")
    skipped = _APART.union(_HANDLES.get(name, ()) if vars(image).get("n_frames", 1) == 1 else ())
    state = {
        "name": name,
        "mode": image.mode,
        "size": image.size,
        "attributes": {attribute: value for attribute, value in vars(image).items() if attribute not in skipped},
        "palette": _palette_state(image.palette),
        "exif": None if exif is None else (
            exif._loaded_exif, dict(sorted(exif.items())),
            {"_loaded": exif._loaded, "_hidden_data": exif._hidden_data, "_ifds": exif._ifds},
        ),
    }  # fmt: skip
    # Attributes before pixels: those are what may be refused, and reading pixels takes note of a new palette.
    for attribute, value in (*state["attributes"].items(), ("palette", state["palette"]), ("getexif()", state["exif"])):
        check(value, attribute)
    before = None if image.palette is None else dict(vars(image.palette))
    state["pixels"] = image.tobytes()
    if image.mode in ("P", "PA"):
        mode = image.im.getpalettemode()
        state["colors"] = bytes(image.getpalette(mode)), mode
    if before is not None:
        vars(image.palette).update(before)
    return state


def _from_pixels(state: Mapping[str, Any]) -> Image.Image:
    """Return the image of a `_pixel_state`."""
    image: Any = Image.frombytes(state["mode"], state["size"], state["pixels"])
    if "colors" in state:
        image.putpalette(*state["colors"])
        image.load()
    image.palette = _palette(state["palette"])
    if name := state["name"]:
        if not _FILE_CLASS.fullmatch(name):
            raise ValueError(f"{name} is no class of Pillow's")
        module, _, kind = name.rpartition(".")
        made = getattr(importlib.import_module(module), kind)
        file = made.__new__(made)
        vars(file).update(vars(image))
        image = file
    vars(image).update(state["attributes"])
    if state["exif"] is not None:
        source, entries, attributes = state["exif"]
        exif = image._exif = Image.Exif()
        if source is not None:
            exif.load(source)
            for tag in list(exif):
                del exif[tag]
        exif.update(entries)
        vars(exif).update(attributes)
    return image  # type: ignore[no-any-return]


def _palette_state(palette: Any) -> dict[str, Any] | None:
    """Return a palette's attributes as plain values."""
    if palette is None:
        return None
    state = dict(vars(palette))
    if state.get("_colors") is not None:
        state["_colors"] = list(state["_colors"].items())
    return state


def _palette(state: Mapping[str, Any] | None) -> Any:
    """Return the palette of a `_palette_state`."""
    if state is None:
        return None
    palette: Any = ImagePalette()
    vars(palette).update(state)
    if palette._colors is not None:
        palette._colors = dict(palette._colors)
    return palette


def _file_state(image: Any, name: str, why: str, *, decoded: bool) -> tuple[Any, ...]:
    """Return the arguments of `_from_file` for an image, and `why` its pixels and attributes are not kept instead."""
    file = vars(image).get("_fp") or image.fp
    try:
        place = file.tell()
        file.seek(0)
        raw = file.read()
        file.seek(place)
    except (AttributeError, OSError, ValueError):
        raise Unstorable(f"is a {name} {why}, and its file is closed ({_HINT})") from None
    state = raw, image.tell(), decoded, image._exclusive_fp, image.filename
    if not _same(image, _from_file(*state), decoded=decoded):
        raise Unstorable(f"is a {name} {why}, and is not what its file gives (changed, or another frame) ({_HINT})")
    return state


def _from_file(raw: bytes, frame: int, decoded: bool, exclusive: bool, filename: str) -> Any:
    """Return the image of a file's bytes, at a frame."""
    image: Any = Image.open(io.BytesIO(raw))
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


def _same(image: Any, again: Any, *, decoded: bool) -> bool:
    """Return whether an image is what opening its file gave; `again` must not be used afterwards."""
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
    if isinstance(one, ImagePalette):
        return type(one) is type(other) and _palette_state(one) == _palette_state(other)
    plain = isinstance(one, str | bytes | bytearray | int | float | tuple | list | Mapping)
    return type(one) is type(other) and (not plain or one == other)


MAKE: dict[str, Callable[..., Any]] = {
    "pixels": _from_pixels, "file": _from_file, "iTXt": iTXt, "IFDRational": IFDRational,
}  # fmt: skip
