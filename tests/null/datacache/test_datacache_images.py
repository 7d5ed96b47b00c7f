"""Pillow images: a transform sees through the cache what it sees without it, in every mode and format."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.datacache import CachedDataset
from runtime.errors import CacheWarning, InputError

pytest.importorskip("PIL")  # the rest needs it
from PIL import Image, ImageOps, PngImagePlugin

MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "I", "F", "I;16",
         "I;16L", "I;16B", "I;16N")  # fmt: skip
"""All but LAB, into whose profile Pillow writes the time when it converts."""
SIZE = (24, 15)
Image.init()


def picture(mode: str) -> Image.Image:
    """An image with many colours."""
    gray = Image.effect_noise(SIZE, 90)
    bands = gray, gray.transpose(Image.Transpose.ROTATE_180), gray.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for source in (Image.merge("RGB", bands), gray):
        try:
            return source.convert(mode)
        except ValueError:
            continue
    return Image.new(mode, SIZE)


def exif() -> Image.Exif:
    """An orientation, and parts of other directories."""
    made = Image.Exif()
    made[0x0112] = 6
    made[0x010F] = "maker"
    made.get_ifd(0x8769)[0x9003] = "2020:01:01 00:00:00"
    made.get_ifd(0x8825)[1] = "N"
    return made


def texts() -> PngImagePlugin.PngInfo:
    """PNG's kinds of text."""
    made = PngImagePlugin.PngInfo()
    made.add_text("Comment", "plain")
    made.add_itxt("Title", "gülden", "de", "Titel")
    return made


FORMATS: dict[str, list[dict[str, Any]]] = {
    "PNG": [{}, {"exif": exif(), "pnginfo": texts(), "dpi": (72, 72), "icc_profile": b"x" * 200},
            {"transparency": 0}, {"transparency": b"\x00\x40\x80"}],
    "JPEG": [{}, {"exif": exif(), "comment": b"said", "dpi": (72, 72), "progressive": True}],
    "WEBP": [{}, {"exif": exif(), "lossless": True, "xmp": b"<x/>"}],
    "TIFF": [{}, {"exif": exif(), "dpi": (72, 72.5), "compression": "tiff_lzw"}],
    "GIF": [{}, {"transparency": 0, "comment": b"said"}],
    "BMP": [{}], "PPM": [{}], "TGA": [{}], "PCX": [{}], "ICO": [{}], "DDS": [{}], "SGI": [{}], "QOI": [{}],
    "JPEG2000": [{}], "XBM": [{}], "SPIDER": [{}],
}  # fmt: skip
SEVERAL = ("GIF", "PNG", "TIFF", "WEBP", "MPO")


def files(kind: str) -> list[bytes]:
    """One file for each mode and set of options that Pillow writes in this format."""
    found = []
    for mode in MODES:
        for options in FORMATS.get(kind, []):
            found.append(written(picture(mode), kind, **options))
        if kind in SEVERAL:
            frames = [picture(mode).transpose(Image.Transpose.ROTATE_180), picture(mode)]
            found.append(written(picture(mode), kind, save_all=True, append_images=frames))
    return [raw for raw in found if raw is not None]


def written(image: Image.Image, kind: str, **options: Any) -> bytes | None:
    """The file, or None where Pillow cannot write it."""
    file = io.BytesIO()
    try:
        image.save(file, kind, **options)
    except Exception:
        return None
    return file.getvalue()


class Pictures:
    """Each file in each state that a dataset may leave an image in."""

    def __init__(self, files: list[bytes], state: Callable[[Any], Any], path: Path | None = None) -> None:
        self.files = files
        self.state = state
        self.path = path
        if path is not None:
            path.mkdir()
            for index, raw in enumerate(files):
                (path / str(index)).write_bytes(raw)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        found = Image.open(io.BytesIO(self.files[index]) if self.path is None else self.path / str(index))
        return self.state(found)


def opened(image: Any) -> Any:
    """As Image.open gives it."""
    return image


def loaded(image: Any) -> Any:
    """Decoded, and asked for its EXIF."""
    image.load()
    image.getexif().get_ifd(0x8769)
    return image


def closed(image: Any) -> Any:
    """As a `with` leaves it."""
    with image:
        image.load()
    return image


def with_label(image: Any) -> Any:
    """A copy to which a script has added something."""
    copied = image.copy()
    copied.info["label"] = [(1, 2.5, None), {"a": b"bytes"}]
    copied.label = "cat"
    copied.getexif()[0x0112] = 3
    return copied


STATES: dict[str, Callable[[Any], Any]] = {
    "opened": opened, "loaded": loaded, "closed": closed, "with a label": with_label,
    "copy": lambda image: image.copy(), "RGB": lambda image: image.convert("RGB"),
    "RGBA": lambda image: image.convert("RGBA"), "P": lambda image: image.convert("P"),
    "quantized": lambda image: image.convert("RGB").quantize(8), "transposed": ImageOps.exif_transpose,
}  # fmt: skip
REFUSED = {
    "opened": ("JPEG2000",),
    "loaded": ("WEBP",),
    "closed": ("PNG", "WEBP", "TIFF", "GIF", "MPO", "ICO", "SPIDER"),
}
"""Formats of which some images cannot be kept in a state: other frames or tags need their file."""


def typed(value: Any) -> Any:
    """A value that compares by its types too."""
    if isinstance(value, dict):
        return "dict", [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, tuple | list):
        return type(value).__name__, [typed(item) for item in value]
    return type(value).__name__, value, *(getattr(value, part, None) for part in ("lang", "tkey"))


def attributes(image: Any) -> Any:
    """What may be read without asking for pixels."""
    palette = image.palette and (image.palette.mode, image.palette.rawmode, bytes(image.palette.palette))
    return [
        type(image), image.mode, image.size, image.format, image.has_transparency_data, typed(image.info), palette,
        *(typed(getattr(image, name, None))
          for name in ("filename", "quantization", "layers", "app", "text", "label", "decoderconfig")),
    ]  # fmt: skip


def look(image: Any) -> list[Any]:
    """All that a transform might ask an image."""
    seen = [attributes(image)]
    for ask in (
        lambda: sorted(image.getexif().items()),
        lambda: [image.getexif().get_ifd(tag) for tag in (0x8769, 0x8825)],
        lambda: image.tobytes(),
        lambda: (image.getpalette(), image.getpalette(None), image.palette.colors),
        lambda: attributes(image),
        lambda: [image.convert(mode).tobytes() for mode in ("RGB", "RGBA", "L")],
        lambda: [attributes(part) for part in (ImageOps.exif_transpose(image), image.copy(), image.resize((5, 5)))],
        lambda: image.get_format_mimetype(),
        lambda: sorted(image.tag_v2.items()),
        lambda: written(image, "PNG"),
        lambda: (image.n_frames, image.is_animated, image.tell()),
        lambda: [
            (image.seek(frame), image.tell(), image.mode, image.tobytes(), typed(image.info)) for frame in range(3)
        ],
    ):
        try:
            seen.append(ask())
        except Exception as error:
            seen.append((type(error), str(error).partition("<")[0]))  # some show addresses
    return seen


def shrink(image: Any) -> list[Any]:
    """What is decoded differently where only a small image is wanted, before anybody has asked for the pixels."""
    image.thumbnail((7, 7))
    return [attributes(image), image.tobytes()]


SOME = ("JPEG", "loaded")
"""A format with every state of an image, and a state with every format; together they are many."""


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        pytest.param(state, kind, marks=() if kind == SOME[0] or state == SOME[1] else pytest.mark.long)
        for state in STATES
        for kind in (*FORMATS, "MPO")
    ],
)
def test_a_transform_sees_what_it_sees_without_the_cache(tmp_path: Path, kind: str, state: str) -> None:
    warnings.simplefilter("ignore", UserWarning)  # Pillow's about transparency
    files_at = tmp_path / "files" if state in ("opened", "closed") else None
    pictures = Pictures(files(kind), STATES[state], files_at)
    assert len(pictures) > 0
    options: dict[str, Any] = {"local_dir": tmp_path / "cache", "name": "pictures", "probe": False}
    for transform in (look, shrink):
        expected = [transform(pictures[index]) for index in range(len(pictures))]
        both = CachedDataset(pictures, memory_bytes=2**24, transform=transform, **options)
        disk = CachedDataset(pictures, transform=transform, **options)
        for cached in (both, both, disk):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always", CacheWarning)
                for index in range(len(pictures)):
                    assert cached[index] == expected[index], f"{kind} {state} {index}"
            assert len([one for one in said if "which cannot be stored, so it is made anew" in str(one.message)]) <= 1
            both.flush()
        refused = disk.stats().unstorable
        # ICO's info has a set, which is no plain value.
        assert bool(refused) == (
            kind in REFUSED.get(state, ()) or (kind == "ICO" and state not in ("opened", "loaded"))
        )
        assert both.stats().memory_hits == disk.stats().disk_hits == len(pictures) - refused
        both.close()
        disk.close()


class Odd(Image.Image):
    """A class of somebody else's."""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda image: loaded(image).info.update(label=object()),
            r"JpegImageFile whose info\['label'\] is a builtins.object, and its file is closed \(return its copy",
        ),
        (
            lambda image: image.draft("L", (8, 8)),
            "JpegImageFile that is not decoded yet, and is not what its file gives",
        ),
        (
            lambda image: image.fp.close(),
            r"JpegImageFile that is not decoded yet, and its file is closed \(return its copy",
        ),
        (lambda image: setattr(image, "__class__", Odd), r"a class that is not Pillow's own \(return its copy"),
    ],
    ids=["object in info", "draft", "closed", "class"],
)
def test_what_cannot_be_kept_is_refused_in_words(change: Callable[[Any], Any], words: str) -> None:
    def changed(image: Any) -> Any:
        change(image)
        return image

    raw = written(picture("RGB").resize((64, 64)), "JPEG")
    assert raw is not None
    with pytest.raises(InputError, match=words):
        CachedDataset(Pictures([raw], changed), memory_bytes=2**20)


def test_decoded_images_are_not_decoded_again() -> None:
    """Also those that still know their file."""
    raw = written(picture("RGB"), "JPEG")
    assert raw is not None
    for state in (loaded, STATES["RGB"]):
        cached = CachedDataset(Pictures([raw], state), memory_bytes=2**20)
        cached[0]
        assert not getattr(cached[0], "tile", [])
