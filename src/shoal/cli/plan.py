"""``shoal plan FILE [field=value ...]``: the best plans for a job on a cluster, and why."""

import json
import sys
from typing import Annotated

import typer

from shoal.cli.loading import told

HELP = "Say which plan is best for the Job in FILE on a cluster: memory, time, its parts, and why."


def command(
    file: Annotated[str | None, typer.Argument(help="Python file with a Job", metavar="FILE")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="fields of the job", metavar="[FIELD=VALUE ...]")
    ] = None,
    *,
    cluster: Annotated[
        str | None, typer.Option(help="preset, or a TOML file (default: this machine, measured)", metavar="NAME|FILE")
    ] = None,
    world: Annotated[int | None, typer.Option(help="devices (default: all of the cluster's)")] = None,
    global_batch: Annotated[int | None, typer.Option(help="samples in a step (default: the job's own)")] = None,
    precision: Annotated[
        str | None, typer.Option(help="compute precision (default: the job's own)", metavar="fp32|bf16|fp16|fp64")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="plans of this mesh alone (default: of all)", metavar="pipeline=2,tensor=2,...")
    ] = None,
    out: Annotated[str | None, typer.Option("-o", "--out", help="write the best plan here", metavar="TOML")] = None,
    top: Annotated[int, typer.Option(help="plans to show, each of another mesh unless one is given")] = 5,
    blueprint: Annotated[
        str | None, typer.Option(help="a saved blueprint in place of FILE; needs no torch", metavar="JSON")
    ] = None,
    save_blueprint: Annotated[str | None, typer.Option(help="keep the traced model here", metavar="JSON")] = None,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(help="hold two plans' files against each other", metavar="TOML TOML")
    ] = None,
    scale: Annotated[
        str | None, typer.Option(help="the best plan on each of so many devices", metavar="8,64,512")
    ] = None,
    scale_plot: Annotated[str | None, typer.Option(help="picture of --scale", metavar="FILE.html|FILE.svg")] = None,
    price: Annotated[float | None, typer.Option(help="of a device-hour: what a billion tokens cost")] = None,
    timeline: Annotated[
        str | None,
        typer.Option(
            help="picture of the best plan's step, or a trace for Perfetto", metavar="FILE.html|FILE.svg|FILE.json"
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option(help="run so many of the best plans here for a few steps, and rank anew", min=0)
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object as the last line of stdout")] = False,
) -> None:
    """Run the command. Exit status: 0 where a plan fits, else 1."""
    from shoal.launch.planning import Extras, checked, more, plan, shared

    asked = Extras(compare, scale, scale_plot, price, timeline, trials, out, save_blueprint, mesh)
    with told():
        extras = checked(asked, file)
        planned = plan(
            file, fields=overrides or [], blueprint=blueprint, cluster=cluster, world=world,
            global_batch=shared(extras.plans, "global_batch", global_batch),
            precision=shared(extras.plans, "precision", precision), top=top, mesh=mesh,
        )  # fmt: skip
        if save_blueprint is not None:
            planned.sketch.write(save_blueprint)
        print("\n".join(planned.lines()), flush=True)
        answers = more(planned, extras, file, overrides or [])
        print(*answers.lines, sep="\n", end="\n" * bool(answers.lines), flush=True)
        if out is not None and planned.best:
            planned.plan.write(out)
        elif out is not None:
            print(f"error: no plan fits; {out} was not written", file=sys.stderr)
    if as_json:
        print(json.dumps({**planned.as_json(), **answers.values}), flush=True)
    raise SystemExit(0 if planned.best else 1)
