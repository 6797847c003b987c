"""The command line of `antiphon bench`: its flags, and the measurements that they ask for."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from server.bench.inside import Inside, decode_step_s
from server.bench.load import Load, Prompts
from server.bench.measure import Case, Plan, Target, measure
from server.bench.outside import APIS, Outside, ServerRefused, base_url, first_model
from server.bench.report import Pace, as_json, compared, legend, pairs, plot, text
from server.config import Config, bearer
from server.environment import without_secrets
from server.masking import masked
from server.progress import Progress

REFUSED = 2


class BenchError(Exception):
    """What was asked for cannot be measured; the message says why, on one line."""


# ------------------------------------------------------------------------------------------------------------
# Flags


def add_arguments(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Add the verbs; returns those that run an engine here, and so take its settings."""
    verbs = parser.add_subparsers(dest="verb", metavar="latency|throughput|serve|checkpoint", required=True)
    latency = verbs.add_parser(
        "latency",
        help="an engine in this process: batches sent at once, and decoding compared with the memory's rate",
    )
    throughput = verbs.add_parser(
        "throughput", help="an engine in this process, under requests that come one by one"
    )
    serve = verbs.add_parser("serve", help="a server over HTTP, or two beside each other")
    checkpoint = verbs.add_parser(
        "checkpoint", help="write a model of a real size with random weights, for any server"
    )
    checkpoint.add_argument("shape", help="the model's size, such as qwen3-0.6b; an unknown one lists all")
    checkpoint.add_argument("folder", type=Path, help="folder to write, which is made")
    checkpoint.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")

    latency.add_argument("--batch", type=_counts, default=(1,), help="requests at once: 1,4,16 (default 1)")
    for verb in (throughput, serve):
        loads = verb.add_mutually_exclusive_group()
        loads.add_argument(
            "--concurrency",
            type=_counts,
            default=None,
            help="requests that are kept in flight; each of several numbers is a load: 1,4,16",
        )
        loads.add_argument(
            "--rate",
            type=_rates,
            default=None,
            help="requests a second, at random times; each of several is a load: 2,8",
        )
        verb.add_argument(
            "--requests", type=_count, default=None, help="requests of a round (default: by the load)"
        )
        verb.add_argument(
            "--prefix-tokens",
            type=int,
            default=0,
            help="first tokens of the input that prompts share (default 0)",
        )
        verb.add_argument(
            "--prefix-share",
            type=_share,
            default=1.0,
            help="share of the prompts that begin with them, 0 to 1 (default 1)",
        )
    for verb in (latency, throughput):
        verb.add_argument(
            "--shape", help="random weights of this size in place of --model, such as qwen3-0.6b"
        )
    for verb, rounds in ((latency, 5), (throughput, 1), (serve, 3)):
        verb.add_argument("--input", type=_count, default=256, help="tokens of a prompt (default 256)")
        verb.add_argument("--output", type=_count, default=64, help="tokens of an answer (default 64)")
        verb.add_argument(
            "--rounds", type=_count, default=rounds, help=f"how often a load is put (default {rounds})"
        )
        verb.add_argument(
            "--warmup",
            type=int,
            default=None,
            help="requests before a load that are not measured (default: by the load)",
        )
        verb.add_argument(
            "--temperature", type=float, default=0.0, help="temperature of the sampling (default 0)"
        )
        verb.add_argument(
            "--seed", type=int, default=0, help="seed of arrival times, shared prefixes and sampling"
        )
        verb.add_argument(
            "--json", type=Path, metavar="FILE", help="write everything that was measured to this file"
        )
        verb.add_argument("--plot", type=Path, metavar="FILE", help="draw it as a PNG (needs matplotlib)")
    _add_servers(serve)
    return [latency, throughput]


def _add_servers(parser: argparse.ArgumentParser) -> None:
    url = os.environ.get("ANTIPHON_URL", "http://127.0.0.1:8000")
    parser.add_argument("--url", default=url, help=f"the server (or ANTIPHON_URL; default {masked(url)})")
    parser.add_argument("--model", help="a name that it lists (default: the first)")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("ANTIPHON_CHAT_KEY"),
        help="a key of the server (or ANTIPHON_CHAT_KEY)",
    )
    parser.add_argument(
        "--compare", metavar="URL", help="a second server, in turn with the first; prints ratios"
    )
    parser.add_argument(
        "--compare-model", help="the second server's model (default: the first that it lists)"
    )
    parser.add_argument("--compare-api-key", help="the second server's key")
    parser.add_argument(
        "--api", choices=tuple(APIS), default="responses", help="the API to ask through (default %(default)s)"
    )
    parser.add_argument(
        "--compare-api",
        choices=tuple(APIS),
        help="the API to ask the second server through (default: as the first)",
    )
    parser.add_argument(
        "--store", action="store_true", help="have responses stored; they stay on the server (default: not)"
    )
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask, as an extra field, that every answer has all of its tokens; some servers refuse that",
    )
    parser.add_argument("--body", type=_body, default={}, metavar="JSON", help="more fields of every request")
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        help="seconds until a request has failed (default %(default)g)",
    )


def _count(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of at least 1")
    return int(value)


def _counts(value: str) -> tuple[int, ...]:
    return tuple(map(_count, value.split(",")))


def _rates(value: str) -> tuple[float, ...]:
    try:
        rates = tuple(map(float, value.split(",")))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < 1e6 for rate in rates):
        raise argparse.ArgumentTypeError(f"{value!r} is not a rate above 0")
    return rates


def _share(value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not between 0 and 1")
    return share


def _body(value: str) -> dict[str, Any]:
    try:
        body = orjson.loads(value)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return body


# ------------------------------------------------------------------------------------------------------------
# Running


def run(options: argparse.Namespace, config: Config | None) -> int:
    """Run a verb; 1 when a request failed, 2 when there was nothing to measure. config: of the verbs that run
    an engine."""
    try:
        if options.verb == "checkpoint":
            return _checkpoint(options)
        _check(options)
        if config is None:
            return asyncio.run(_serve(options))
        with _model(options, config) as chosen:
            return asyncio.run(_inside(options, chosen))
    except (BenchError, ServerRefused, OSError) as error:
        print(f"antiphon: {error}", file=sys.stderr)
        return REFUSED


def _checkpoint(options: argparse.Namespace) -> int:
    _write(options.shape, options.folder, options.seed)
    print(f"{options.folder} holds {options.shape} with random weights")
    return 0


def _write(shape: str, folder: Path, seed: int) -> None:
    from engine import SIZES, write_random_model

    if shape not in SIZES:
        raise BenchError(f"there is no shape {shape!r}; there are {', '.join(SIZES)}")
    with Progress(f"writing {shape} with random weights"):
        write_random_model(shape, folder, seed=seed)


def _check(options: argparse.Namespace) -> None:
    """Raise BenchError for what would fail only after everything was measured."""
    for file in filter(None, (options.json, options.plot)):
        if not file.absolute().parent.is_dir():
            raise BenchError(f"there is no folder to write {file} into")
    if options.plot:
        from importlib.util import find_spec

        if find_spec("matplotlib") is None:
            raise BenchError("--plot needs matplotlib: pip install matplotlib")
    if getattr(options, "prefix_tokens", 0) >= options.input:
        raise BenchError("--prefix-tokens must leave some of the --input tokens to each prompt")


@contextmanager
def _model(options: argparse.Namespace, config: Config) -> Iterator[Config]:
    """The configuration, with a random model in place of its own where a shape is named."""
    if options.shape is None:
        yield config
        return
    with tempfile.TemporaryDirectory(prefix="antiphon-") as folder:
        model = Path(folder) / options.shape
        _write(options.shape, model, options.seed)
        yield config.model_copy(update={"model": str(model), "served_model_name": ()})


async def _inside(options: argparse.Namespace, config: Config) -> int:
    from engine import EngineError, LocalEngine
    from server.model_registry import build_engine

    loading = Progress(f"loading {config.model}")
    try:
        with loading:
            engine = await asyncio.to_thread(build_engine, config)
    except EngineError as error:
        raise BenchError(str(error)) from None
    try:
        with Progress(loading.what):
            info = await engine.start()
        if options.input + options.output > info.max_model_len:
            raise BenchError(
                f"{info.name} holds {info.max_model_len} tokens: less --input and --output together"
            )
        inside = Inside(engine, options.output, temperature=options.temperature, seed=options.seed)
        target = Target(f"{info.name} in this process", inside.ask)
        local = engine if isinstance(engine, LocalEngine) else None
        latency = options.verb == "latency"
        prefix = 0 if latency else options.prefix_tokens
        plan = _plan(options, _prompts(options, options.input, prefix))
        cases: list[Case] = []
        paces: list[Pace | None] = []
        for load in plan.loads:
            with Progress("measuring how fast this machine reads memory"):
                before = await local.read_rate() if local and latency else 0.0
            requests = load.concurrency if latency else plan.requests
            cases += await measure([target], replace(plan, loads=[load], requests=requests))
            paces.append(None)
            step_s = decode_step_s(cases[-1].samples) if latency else None
            if local and step_s:
                rate = (before + await local.read_rate()) / 2
                num_bytes = local.step_bytes(load.concurrency, options.input + options.output // 2)
                paces[-1] = Pace(step_s, num_bytes, rate)
    except EngineError as error:
        raise BenchError(str(error)) from None
    finally:
        await engine.close()
    return _report(options, plan, cases, paces)


async def _serve(options: argparse.Namespace) -> int:
    import httpx

    asked: list[tuple[str, str | None, str | None, str]] = [
        (options.url, options.model, options.api_key, options.api)
    ]
    if options.compare:
        api = options.compare_api or options.api
        asked.append((options.compare, options.compare_model, options.compare_api_key, api))
    for *_, api in asked:
        if options.output < (least := APIS[api].min_output):
            raise BenchError(f"--output is {options.output}, and --api {api} takes {least} tokens or more")
    extra: dict[str, Any] = {"temperature": options.temperature}
    if options.temperature > 0:
        extra["seed"] = options.seed
    if options.ignore_eos:
        extra["ignore_eos"] = True
    extra |= options.body
    targets: list[Target] = []
    sides: list[Outside] = []
    clients: list[httpx.AsyncClient] = []
    try:
        for url, model, key, api in asked:
            try:
                headers = bearer(key)
            except ValueError as error:
                raise BenchError(str(error)) from None
            # A connection a request, as many as the load wants; their time is limited as a whole.
            clients.append(
                httpx.AsyncClient(
                    base_url=base_url(url),
                    headers=headers,
                    timeout=None,
                    limits=httpx.Limits(max_connections=None),
                    trust_env=False,
                )
            )
            name = model or await first_model(clients[-1])
            sides.append(
                Outside(
                    clients[-1], api, name, options.output,
                    store=options.store, timeout_s=options.timeout, extra=extra,
                )
            )  # fmt: skip
            stored = ", stored" if options.store and api == "responses" else ""
            label = f"{without_secrets(url)} ({name}, {api}{stored})"
            targets.append(Target(label, sides[-1].ask, remote=True))
        words, per_word = await sides[0].words(options.input)
        for side in sides[1:]:
            await side.words(options.input)  # that it answers, and its own first requests
        if per_word is None:
            print(
                f"antiphon: {masked(options.url)} counts no tokens: prompts have --input words",
                file=sys.stderr,
            )
        plan = _plan(options, _prompts(options, words, round(options.prefix_tokens / (per_word or 1.0))))
        cases = await measure(targets, plan)
    except httpx.InvalidURL as error:
        raise BenchError(str(error)) from None
    finally:
        for client in clients:
            await client.aclose()
    return _report(options, plan, cases, [None] * len(cases))


def _prompts(options: argparse.Namespace, size: int, prefix: int) -> Prompts:
    share = getattr(options, "prefix_share", 1.0)
    return Prompts(size, min(prefix, size - 1), share, options.seed)


def _plan(options: argparse.Namespace, prompts: Prompts) -> Plan:
    if options.verb == "latency":
        loads = [Load(concurrency=count) for count in options.batch]
    elif options.rate:
        loads = [Load(rate=rate) for rate in options.rate]
    else:
        usual = (64,) if options.verb == "throughput" else (1, 4, 16)
        loads = [Load(concurrency=count) for count in options.concurrency or usual]
    return Plan(
        loads=loads,
        prompts=prompts,
        num_output=options.output,
        rounds=options.rounds,
        requests=getattr(options, "requests", None),
        warmup=options.warmup,
        seed=options.seed,
    )


def _report(
    options: argparse.Namespace, plan: Plan, cases: Sequence[Case], paces: Sequence[Pace | None]
) -> int:
    comparing = bool(getattr(options, "compare", None))
    for case, pace in zip(cases, paces, strict=True):
        for line in text(case, pace):
            print(line)
    for ours, theirs in pairs(cases, comparing):
        for line in compared(ours, theirs):
            print(line)
    for line in legend(cases):
        print(line)
    if options.json:
        options.json.write_bytes(as_json(vars(options), plan, cases, paces, comparing))
    if options.plot:
        plot(cases, options.plot)
    return int(any(case.figures.failed for case in cases))
