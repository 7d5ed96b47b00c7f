"""The commands of `planner model`: a profile.json from the shape of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.options import Flags, print_json

models = typer.Typer(no_args_is_help=True, help="Write a profile.json of a model that was not measured.")


@models.callback()
def _group() -> None:
    """Keep `new` a subcommand of its own."""


@models.command()
def new(
    layers: Annotated[int, typer.Option(help="Transformer blocks.")],
    hidden: Annotated[int, typer.Option(help="Width of the residual stream.")],
    batch: Annotated[int, typer.Option(help="Sequences per rank in a step.")],
    tokens: Annotated[int, typer.Option(help="Length of a sequence.")] = 2048,
    heads: Annotated[int | None, typer.Option(help="Attention heads; default: of 128 channels each.")] = None,
    key_heads: Annotated[int | None, typer.Option(help="Heads of keys and values; default: as many.")] = None,
    feed_forward: Annotated[
        int | None, typer.Option(help="Width of feed-forward layers; default: 8/3 of --hidden, as in Llama.")
    ] = None,
    vocabulary: Annotated[int, typer.Option(help="Tokens that there are.")] = 128_256,
    tied: Annotated[bool, typer.Option("--tied", help="The embedding is also the output layer.")] = False,
    share: Annotated[
        float | None, typer.Option(help="Share of the accelerator's peak that is reached (MFU); default: 0.35.")
    ] = None,
    output: Annotated[str, typer.Option("-o", "--output", help="Where to write the profile.")] = "model.json",
) -> None:
    """Write the estimated profile of a language model from a few numbers: Llama's architecture, bfloat16, AdamW."""
    from planner.documents.shapes import Decoder, new_decoder
    from planner.report.files import check_writable

    check_writable(output)
    model = Decoder(
        layers=layers, width=hidden, batch=batch, tokens=tokens, heads=heads or 0, key_heads=key_heads or 0,
        hidden=feed_forward or 0, vocabulary=vocabulary, tied=tied,
    )  # fmt: skip
    profile = new_decoder(model, share, Path(output).stem)
    profile.save(output)
    if Flags.as_json:
        print_json(profile.to_document())
        return
    numel = sum(gradient.numel for gradient in profile.compute.gradients)
    typer.echo(f"{numel / 1e6:,.1f} M parameters in {len(profile.compute.gradients)} gradients")
    for note in profile.notes or ():
        typer.echo(note)
    typer.echo(f"wrote {output}; continue with: planner advise {output} --cluster CLUSTER")
