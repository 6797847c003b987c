"""Every setting in one place: name, unit, default, environment variable, flag.

A value comes from a flag, else from the environment, else from `antiphon.toml`, else it is the default, and
the configuration knows which of them it was. No other module of the server reads the environment.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
)

from server.event_profiles import Profile
from server.images import ImagesSettings, read_images_settings
from server.limits import ServedTier, parse_limits
from server.masking import masked
from server.mcp_servers import McpSettings, read_mcp_settings
from server.settings import (
    MODELS_TABLE,
    Bytes,
    ModelEntry,
    ModelsFile,
    Seconds,
    entries_beside,
    header_value,
    nearest,
    read_entries,
    read_sealing_key_file,
    read_sealing_keys,
)
from server.web_settings import WebSettings, read_web_settings
from storage import MAX_PERSONS, check_url, why_barred
from tools import Egress, read_rule

THREADED_BYTES = 32 * 1024
"""Bodies above this are parsed in the thread pool: on the loop they would delay every stream."""
SHIPPED_MODEL = "antiphon-tiny"
"""The model that comes with the package; every other value of `model` is a folder or a Hugging Face id."""
SHIPPED_EMBEDDER = "antiphon-embed"
"""The same for vectors, and `embedding_model`."""

FILE_NAME = "antiphon.toml"
TOOLS_NAME = "tools.toml"

TABLES: Mapping[str, Callable[[Any, Mapping[str, str]], Any]] = {
    "images": read_images_settings,
    "mcp": read_mcp_settings,
    "web": read_web_settings,
}
"""What only the file can hold, and what reads it with the environment's variables."""

FROM_FILES = frozenset({*TABLES, "entries"})
"""What only files give."""

NO_SETTINGS = FROM_FILES | {"kv_disk_database", "names_database"}
"""What a configuration has that is no setting: no flag and no variable gives it."""

CLIENT_VARIABLES = frozenset({"ANTIPHON_URL", "ANTIPHON_CHAT_KEY"})
"""Environment variables of `antiphon chat` and `antiphon bench`, which set nothing of a server."""


class ConfigError(Exception):
    """A setting has a value that it cannot have; the message names the setting and its source, on one
    line."""


def _split(value: Any) -> Any:
    """Lists come from the environment as one string with commas."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _or_none(values: tuple[str, ...]) -> tuple[str, ...]:
    if "none" in values and len(values) > 1:
        raise ValueError("'none' stands alone")
    return () if values == ("none",) else values


def _path(value: Any) -> Any:
    try:
        return Path(value).expanduser().absolute() if isinstance(value, str | Path) else value
    except RuntimeError:
        raise ValueError(f"there is no home folder for the ~ of {str(value)!r}") from None


def _named_paths(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        name, _, path = value.partition("=")
        if not name.strip() or not path.strip():
            raise ValueError(f"{value!r} is not of the form NAME=PATH")
    return values


def read_price(value: str) -> tuple[str, Decimal, Decimal, Decimal]:
    """A price as it is configured: the model's name, and what a million tokens of its input, of its cached
    input and of its output cost. Raises ValueError."""
    model, _, amounts = value.rpartition("=")
    if not model.strip() or not _AMOUNTS.fullmatch(amounts.strip()):
        raise ValueError(
            f"{value!r} is not of the form MODEL=INPUT/CACHED/OUTPUT, such as tiny=0.10/0.02/0.40"
        )
    of_input, of_cached, of_output = map(Decimal, amounts.split("/"))
    return model.strip(), of_input, of_cached, of_output


def _prices(values: tuple[str, ...]) -> tuple[str, ...]:
    models = [read_price(value)[0] for value in values]
    if len(set(models)) < len(models):
        raise ValueError("a model has more than one price")
    return values


def _currency(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z]{3}", value):
        raise ValueError(f"{value!r} is no currency: give its three letters, such as usd")
    return value.lower()


def _limits(words: tuple[str, ...]) -> tuple[str, ...]:
    parse_limits(words)
    return words


def _egress_rule(value: str) -> str:
    read_rule(value)
    return value


def _host_pattern(value: str) -> str:
    if not _HOST_PATTERN.fullmatch(value):
        raise ValueError(f"{value!r} is no host name: give NAME without scheme and port, *.NAME, or *")
    return value.lower().rstrip(".")


def _origin(value: str) -> str:
    """A browser sends an origin in exactly one spelling, so any other would silently never match."""
    if value.lower() == "null":
        raise ValueError(
            "'null' is the origin of every sandboxed page, whoever wrote it: it cannot be listed"
        )
    if not _ORIGIN.fullmatch(value):
        raise ValueError(f"{value!r} is no origin: give SCHEME://HOST or SCHEME://HOST:PORT, or *")
    origin = value.lower()
    default_port = {"http": ":80", "https": ":443"}.get(origin.partition(":")[0])
    return origin.removesuffix(default_port) if default_port else origin


def _network(value: str) -> str:
    try:
        return str(ipaddress.ip_network(value))
    except ValueError as error:
        raise ValueError(f"{value!r} is no address and no network ({error})") from None


def _root_path(value: str) -> str:
    path = value.rstrip("/")
    if path and not _ROOT_PATH.fullmatch(path):
        raise ValueError(f"{value!r} is no path: give one that begins with a slash, such as /antiphon")
    return path


def bearer(key: str | None) -> dict[str, str]:
    """The header with a client's key; none without a key. Raises ValueError, which does not repeat the
    key."""
    try:
        said = header_value((key or "").strip())  # a file of Windows leaves a CR at the key's end
    except ValueError as exc:
        raise ValueError(f"the API key cannot be sent: {exc}") from None
    return {"authorization": f"Bearer {said}"} if said else {}


def _api_keys(values: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    if not all(value.get_secret_value().strip() for value in values):
        raise ValueError("a key is empty, which nobody could send")
    return values


def _header_secret(value: SecretStr) -> SecretStr:
    return SecretStr(header_value(value.get_secret_value().strip()))


def _sealing_keys(values: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    read_sealing_keys([value.get_secret_value() for value in values])
    return values


def _instead_of_keys(value: Path | None, info: ValidationInfo) -> Path | None:
    if value is not None and info.data.get("sealing_key"):
        raise ValueError("sealing_key gives keys, too: keep one of the two")
    return value


def _beside_a_certificate(value: Path | None, info: ValidationInfo) -> Path | None:
    if value is not None and info.data.get("ssl_certfile") is None:
        raise ValueError("has no effect without ssl_certfile")
    return value


_HOST_PATTERN = re.compile(
    r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?|\[?[0-9a-f:]*:[0-9a-f:.]*\]?", re.IGNORECASE
)
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:\d+)?", re.IGNORECASE)
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")

_AMOUNTS = re.compile(r"\d{1,9}(\.\d{1,9})?(/\d{1,9}(\.\d{1,9})?){2}", re.ASCII)


def _database(url: str) -> str:
    """The URL of a database that storage can open; one of SQLite names its file by an absolute path, and its
    driver. ValueError for every other."""
    check_url(url)
    scheme, _, rest = url.partition(":///")
    if not scheme.startswith("sqlite"):
        return url
    path, question_mark, query = rest.partition("?")
    file = os.path.abspath(_path(path))
    return f"sqlite+aiosqlite:///{file}{question_mark}{query}"


DatabaseUrl = Annotated[str, AfterValidator(_database)]
Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
NamesOrNone = Annotated[Names, AfterValidator(_or_none)]
HostPatterns = Annotated[tuple[Annotated[str, AfterValidator(_host_pattern)], ...], BeforeValidator(_split)]
Origins = Annotated[tuple[Annotated[str, AfterValidator(_origin)], ...], BeforeValidator(_split)]
Networks = Annotated[tuple[Annotated[str, AfterValidator(_network)], ...], BeforeValidator(_split)]
HeaderValue = Annotated[str, AfterValidator(header_value)]
HeaderSecret = Annotated[SecretStr, AfterValidator(_header_secret)]
Tiers = Annotated[tuple[ServedTier, ...], BeforeValidator(_split)]
LimitWords = Annotated[Names, AfterValidator(_limits)]
EgressRules = Annotated[tuple[Annotated[str, AfterValidator(_egress_rule)], ...], BeforeValidator(_split)]
NamedPaths = Annotated[Names, AfterValidator(_named_paths)]
Prices = Annotated[Names, AfterValidator(_prices)]
Secrets = Annotated[tuple[SecretStr, ...], BeforeValidator(_split)]
ApiKeys = Annotated[Secrets, AfterValidator(_api_keys)]
SealingKeys = Annotated[Secrets, AfterValidator(_sealing_keys)]
Folder = Annotated[Path, BeforeValidator(_path)]
File = Annotated[Path, BeforeValidator(_path)]
SealingKeyFile = Annotated[File | None, AfterValidator(_instead_of_keys)]
TlsFile = Annotated[File | None, AfterValidator(_beside_a_certificate)]


def default_data() -> Path:
    """Where this platform keeps an application's data; the path begins with ~ for a user without a home, who
    has to name another."""
    if sys.platform == "darwin":
        above = "~/Library/Application Support"
    else:
        above = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(os.path.expanduser(above), "antiphon")


_LOCAL = ("local",)
_UPSTREAM = ("upstream",)
_SCRIPTED = ("scripted",)
_WITH_A_MODEL = ("local", "upstream")


def _setting(default: Any, help: str, *, unit: str = "", engines: tuple[str, ...] = (), **bounds: Any) -> Any:
    """One row: `help` is a phrase without a full stop; `engines` are those with which the setting has an
    effect, where it is not all; `bounds` are pydantic's (ge, le, gt, min_length)."""
    given = {"default_factory": default} if callable(default) else {"default": default}
    extra: dict[str, Any] = {"unit": unit, "engines": " ".join(engines)}
    return Field(description=help, json_schema_extra=extra, **given, **bounds)


def _role(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,63}", value):
        raise ValueError("expected a letter, and up to 63 letters, digits, underscores or dashes behind it")
    return value


class Config(BaseModel):
    """All settings. `ANTIPHON_<NAME>` in the environment and `--<name>` on the command line set one each."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=())

    # Only the file has them: a table is no flag.
    images: ImagesSettings = ImagesSettings()
    mcp: McpSettings = McpSettings()
    web: WebSettings = WebSettings()
    entries: ModelsFile = ModelsFile()  # of the file `models`, or of the tables [[models]]
    kv_disk_database: str | None = None  # the id of the database, once a server has opened it
    names_database: bool = False  # the file of settings in the data folder does, by `db`

    # Where it listens, and to whom
    host: str = _setting("127.0.0.1", "address to listen on; any but loopback needs keys")
    port: int = _setting(8000, "port to listen on; 0 takes a free one", ge=0, le=65535)
    api_server_count: int = _setting(
        1,
        "server processes at that port, before one engine in a process of its own, where one interpreter is "
        "too few; more than 1 need a database on PostgreSQL",
        unit="processes",
        ge=1,
        le=64,
    )
    engine_process: bool = _setting(
        False,
        "compute in a process of its own, behind one server process too, so that text, events and storage "
        "have an interpreter to themselves",
    )
    api_key: ApiKeys = _setting(
        (),
        "a key that clients may use (repeatable); other users of this machine can read flags, so "
        "--api-key-file and `antiphon keys create` are safer",
    )
    api_key_file: File | None = _setting(
        None, "file of keys that are accepted, one a line: KEY or OWNER:KEY; # begins a comment"
    )
    allowed_host: HostPatterns = _setting(
        (),
        "name under which the server answers, such as chat.example or *.example (repeatable); * for any; "
        "names of this machine always are; without it any is, unless host is loopback",
    )
    cors_origin: Origins = _setting(
        (),
        "origin whose pages may call from a browser (repeatable); * for any; default: only the server's own",
    )
    cors_method: Names = _setting(("*",), "method that these pages may use (repeatable); * for any")
    cors_header: Names = _setting(("*",), "request header that these pages may send (repeatable); * for any")
    ssl_certfile: File | None = _setting(
        None, "PEM file of the server's certificate and those above it; with it the port speaks TLS only"
    )
    ssl_keyfile: TlsFile = _setting(
        None, "PEM file of the certificate's key, not encrypted; default: in ssl_certfile"
    )
    ssl_ca_certs: TlsFile = _setting(
        None, "PEM file of authorities; with it every client must show a certificate that one of them signed"
    )
    require_tls: bool = _setting(
        False, "refuse plain HTTP where others can connect, but for /health and /ready"
    )
    trusted_proxy: Networks = _setting(
        (),
        "address or network of a proxy whose X-Forwarded-For and X-Forwarded-Proto are believed (repeatable)",
    )
    root_path: Annotated[str, AfterValidator(_root_path)] = _setting(
        "", "path under which a proxy shows the server, whether or not the proxy takes it off"
    )

    docs: bool = _setting(True, "show the reference of the API at /docs and /openapi.json")
    console: bool = _setting(True, "show the web console at /")

    # What it keeps
    store: bool = _setting(
        True, "keep responses of requests that do not say store=false; off: none, and none in the background"
    )
    data: Folder = _setting(default_data, "folder for the database, the lock and antiphon.toml")
    db: DatabaseUrl = _setting(
        lambda values: f"sqlite+aiosqlite:///{values['data']}/antiphon.db",
        "database URL: sqlite:///PATH, or postgresql+asyncpg://USER:PASSWORD@HOST/NAME for one that several "
        "servers share",
    )
    durability: Literal["process", "power"] = _setting(
        "process",
        "what an event survives from the moment that it is sent: the end of the process, or a loss of power "
        "(slower); the end of a response survives both",
    )

    retention_s: Seconds = _setting(
        30 * 86400.0,
        "a stored response or chat completion is kept this long after its end; 0: until deleted",
        unit="s",
        ge=0,
    )
    event_retention_s: Seconds = _setting(
        7 * 86400.0, "its stream can be resumed this long; 0: as long as it is kept", unit="s", ge=0
    )
    max_responses_per_owner: int | None = _setting(
        None,
        "stored responses of one owner, and as many stored chat completions; beyond it the oldest go",
        unit="responses",
        gt=0,
    )
    max_bytes_per_owner: Bytes | None = _setting(
        None,
        "bytes that an owner stores, conversations too; beyond it the oldest responses go, and then 429",
        unit="bytes",
        gt=0,
    )
    max_store_bytes: Bytes | None = _setting(
        None,
        "bytes that all owners store together; beyond it the oldest responses of whoever writes go, and then "
        "429",
        unit="bytes",
        gt=0,
    )
    conversation_retention_s: Seconds = _setting(
        0.0, "a conversation that nobody has used for this long goes; 0: kept until deleted", unit="s", ge=0
    )
    max_identifiers_per_hour: int = _setting(
        MAX_PERSONS,
        "persons of one owner (`safety_identifier`, `user`) for whom usage is told apart in one hour; what "
        "further ones use counts for the owner alone; 0: nobody is told apart",
        unit="persons",
        ge=0,
    )
    identifier_usage_s: Seconds = _setting(
        90 * 86400.0, "what each of them used is kept this long; 0: for ever", unit="s", ge=0
    )

    # What it serves
    engine: Literal["local", "scripted", "upstream"] = _setting(
        "local", "local runs a model; upstream has other servers run it; scripted answers without one"
    )
    model: str = _setting(
        SHIPPED_MODEL,
        "folder or Hugging Face id of a decoder model, or antiphon-small, which ships beside the default",
        engines=_WITH_A_MODEL,
    )
    models: File | None = _setting(
        lambda values: entries_beside(values["data"]),
        "file of several models, each with a name; default: models.toml in the data folder, if it is there",
    )
    models_memory_bytes: Bytes | None = _setting(
        None,
        "memory of the models in processes of their own, together: to make room for one that is wanted, "
        "those go that were idle for longest; default: no limit",
        unit="bytes",
        gt=0,
    )
    model_load_s: Seconds = _setting(
        60.0, "a request waits this long for its model to be loaded before 503", unit="s", gt=0
    )
    max_waiting_for_load: int = _setting(
        64, "requests that wait for one model to be loaded before 503", unit="requests", gt=0
    )
    served_model_name: Names = _setting(
        (), "name in /v1/models (repeatable: aliases); default: the model's own"
    )
    messages_model: str | None = _setting(
        None,
        "served model that /v1/messages answers with where a request names one that is not served; default: "
        "the first model for names that begin with claude, which clients of that API send by themselves, and "
        "404 for any other",
    )
    lora: NamedPaths = _setting(
        (),
        "a LoRA adapter that is served beside the model (repeatable), as NAME=PATH: requests ask for the "
        "model NAME, and PATH is a folder or a Hugging Face id",
        engines=_LOCAL,
    )
    max_lora_rank: int | None = _setting(
        None, "an adapter of a higher rank is refused at the start; default: any rank", gt=0, engines=_LOCAL
    )
    embedding_model: NamesOrNone = _setting(
        lambda values: (
            (SHIPPED_EMBEDDER,) if values["engine"] == "local" and not values["entries"].models else ()
        ),
        "a model for /v1/embeddings beside the model (repeatable): a folder or a Hugging Face id, or "
        "NAME=FOLDER where it is to have another name than the last part of that; none: there is none; "
        "default: the shipped one, where the settings name one model that is computed here",
    )
    rerank_model: Names = _setting(
        (), "the same for /v1/rerank and /v1/score: a cross-encoder, or Qwen3-Reranker"
    )
    classification_model: Names = _setting((), "the same for /v1/classify: a sequence classifier")
    speech_model: Names = _setting((), "the same for /v1/audio: a Whisper model")
    moderation_model: str | None = _setting(
        None,
        "which of these judges what is asked and answered, for requests with `moderation` and for "
        "/v1/moderations; default: none does",
    )
    moderation_threshold: float = _setting(
        0.5, "a label that is at least this probable flags a text", gt=0, le=1
    )
    moderation_safe_label: tuple[str, ...] = _setting(
        ("safe",), "label of that model that flags nothing, in any case of letters (repeatable)"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting(
        "auto",
        "type that it computes in; auto: float32 for small models on a CPU, else the checkpoint's",
        engines=_LOCAL,
    )
    device: Literal["auto", "cpu", "cuda"] = _setting(
        "auto", "where the model runs; auto: a GPU where there is one", engines=_LOCAL
    )
    quantization: Literal["none", "int8", "int4", "fp8"] = _setting(
        "none",
        "fewer bits a weight: less memory, quicker for few requests at once, less exact; "
        "int8 and int4 on a CPU, fp8 on a GPU (on a CPU it saves memory only)",
        engines=_LOCAL,
    )
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = _setting(
        "auto",
        "what keys and values are kept as; fp8 (on a GPU) and int8 (on a CPU): twice the tokens in the same "
        "memory, less exact",
        engines=_LOCAL,
    )
    compile: bool = _setting(
        False,
        "compute models other than Llama, Mistral, Qwen2 and Qwen3 by torch.compile, which makes answers "
        "quicker and a start a minute longer",
        engines=_LOCAL,
    )
    deterministic: bool = _setting(
        False,
        "a request's tokens never depend on what else is computed, nor on a crash; slower",
        engines=_LOCAL,
    )
    max_model_len: int | None = _setting(
        None, "longest context; default: the checkpoint's", unit="tokens", gt=0, engines=_WITH_A_MODEL
    )
    max_num_seqs: int = _setting(
        256, "sequences that are generated at once", unit="sequences", gt=0, engines=(*_LOCAL, *_SCRIPTED)
    )
    max_num_batched_tokens: int = _setting(
        2048, "tokens that one engine step computes", unit="tokens", ge=16, engines=_LOCAL
    )
    kv_cache_bytes: Bytes | None = _setting(
        None, "size of the KV cache; default: by the machine", unit="bytes", gt=0, engines=_LOCAL
    )
    text_only: bool = _setting(
        False, "of a model that sees, serve its language model alone: it takes less memory", engines=_LOCAL
    )
    image_cache_bytes: Bytes = _setting(
        256 << 20,
        "features of images that are kept for later prompts with the same image, and as much of their pixels",
        unit="bytes",
        ge=0,
        engines=_LOCAL,
    )
    gpu_memory_utilization: float | None = _setting(
        None,
        "share of a GPU's memory that weights, activations and the KV cache may take together; default: all "
        "that is free but a reserve",
        gt=0,
        le=1,
        engines=_LOCAL,
    )
    prefix_caching: bool = _setting(
        True,
        "keep what was computed of a prompt for later ones that begin alike, in the blocks of the KV cache "
        "that nothing else needs; false: every prompt is computed whole",
        engines=_LOCAL,
    )
    kv_disk_bytes: Bytes = _setting(
        10 << 30,
        "what was computed of stored responses and conversations is kept on disk up to this size, and read "
        "from there where that is quicker, after a restart too; 0: none is",
        unit="bytes",
        ge=0,
        engines=_LOCAL,
    )
    kv_disk_folder: Folder = _setting(
        lambda values: values["data"] / "kv",
        "folder for that, which servers of one database may share; default: kv in data",
        engines=_LOCAL,
    )
    kv_tier_dtype: Literal["auto", "int8"] = _setting(
        "auto",
        "what is kept there; auto: the same bits; int8: twice as much in the same space, less exact",
        engines=_LOCAL,
    )
    prompt_cache_key_salts: bool = _setting(
        False,
        "prompts share what was computed of them only with those of the same prompt_cache_key; false: the "
        "key makes no difference",
    )
    num_threads: int | None = _setting(
        None, "threads of one operation on a CPU; default: torch's choice", gt=0, engines=_LOCAL
    )
    cpu_kernels: bool = _setting(
        True,
        "compute on a CPU with the server's own C++ kernels, which the first start compiles with g++; false: "
        "with those of torch",
        engines=_LOCAL,
    )
    chat_template: str | None = _setting(
        None, "chat template that replaces the model's own: its file, or the template itself"
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = _setting(
        "auto",  # a template that reads lists alone shows a string letter by letter, and the reverse
        "how the chat template is given texts; openai: as lists of parts, string: as they are, auto: as the "
        "template takes them",
    )
    response_role: Annotated[str, AfterValidator(_role)] = _setting(
        "assistant", "role of the answers of chat completions, for clients that were made for another one"
    )
    trust_request_chat_template: bool = _setting(
        False,  # a template is a program, which may run for as long as it likes
        "chat completions may bring a chat_template of their own; for clients that you trust like yourself",
    )
    allow_special_tokens: bool = _setting(
        False, "what clients write in messages and tools may become control tokens, such as <|im_start|>"
    )
    tool_dialect: str | None = _setting(
        None,
        "how the model writes tool calls: a dialect's name, or none; default: by its chat template",
        engines=_WITH_A_MODEL,
    )
    reasoning_dialect: str | None = _setting(
        None,
        "how it marks its reasoning: a dialect's name, or none; default: by its chat template",
        engines=_WITH_A_MODEL,
    )
    generation_config: Literal["auto", "none"] = _setting(
        "auto",
        "auto takes unset sampling fields, and the limit of an answer without one (max_new_tokens), from the "
        "checkpoint's generation_config.json",
        engines=_WITH_A_MODEL,
    )

    default_temperature: float | None = _setting(
        None, "temperature of requests that name none; default: the checkpoint's, else 1", ge=0, le=2
    )
    default_max_output_tokens: int | None = _setting(
        None,
        "limit of an answer without one; default: the checkpoint's, else the context",
        unit="tokens",
        gt=0,
    )

    num_assistant_tokens: int = _setting(
        8,
        "tokens guessed ahead and checked in one step; the text stays the same; 0: none",
        ge=0,
        le=32,
        engines=_LOCAL,
    )
    max_ngram_size: int = _setting(
        3,
        "without a draft model, guesses are what followed where the last tokens of the text stood before; at "
        "most this many last tokens are looked up",
        unit="tokens",
        ge=1,
        le=16,
        engines=_LOCAL,
    )
    draft_model: str | None = _setting(
        None,
        "folder or Hugging Face id of a small model with the same tokenizer that guesses instead",
        engines=_LOCAL,
    )
    assistant_confidence_threshold: float = _setting(
        0.4, "the draft model stops guessing at a token less probable than this", ge=0, le=1, engines=_LOCAL
    )

    # Who runs the model, with `engine = upstream`; `model` is then read for its tokenizer and template only
    upstream: Names = _setting((), "URL of a vLLM, SGLang or Antiphon server (repeatable)", engines=_UPSTREAM)
    upstream_model: str | None = _setting(
        None, "the model's name there; default: the first that they list", engines=_UPSTREAM
    )
    upstream_api_key: HeaderSecret | None = _setting(None, "key to send to them", engines=_UPSTREAM)
    upstream_timeout_s: Seconds = _setting(
        60.0,
        "an upstream that is silent for this long in an answer counts as down",
        unit="s",
        gt=0,
        engines=_UPSTREAM,
    )
    upstream_patience_s: Seconds = _setting(
        30.0,
        "a request waits this long for an upstream that is up before 503",
        unit="s",
        ge=0,
        engines=_UPSTREAM,
    )

    # Tools, and what they may reach
    tools: File | None = _setting(
        lambda values: file if os.path.exists(file := values["data"] / TOOLS_NAME) else None,
        "file of the operator's own tools; default: tools.toml in the data folder, if it is there",
    )
    responses_profile: Profile = _setting(
        "openai",
        "how the events of responses are named where no header x-antiphon-profile says it: as the official "
        "ones, or as older clients expect them",
    )
    unsupported_tools: Literal["refuse", "ignore"] = _setting(
        "refuse",
        "what becomes of tools that no model can call here, and of types that are not official: a 400, or, "
        "for clients that always send one, they are left out",
    )
    egress: Literal["off", "public", "any"] = _setting(
        "off",
        "where requests may have the server connect to: off nowhere, public to public addresses at ports 80 "
        "and 443, any to this machine and its networks, too",
    )
    egress_allow: EgressRules = _setting(
        (),
        "where they may besides (repeatable): NAME, *.NAME, ADDRESS or NETWORK, at ports 80 and 443, or with "
        ":PORT or :*",
    )
    allowed_media_domains: HostPatterns = _setting(
        (),
        "hosts that images for models that see are fetched from (repeatable): NAME or *.NAME, of those that "
        "egress lets in; default: all of them",
    )
    allowed_local_media_path: Folder | None = _setting(
        None, "folder of this machine whose images requests may name by their paths; default: none"
    )
    sandbox: Literal["off", "auto", "bubblewrap", "landlock", "monty", "command"] = _setting(
        "off",  # to run what strangers' prompts make a model write is for an operator to decide
        "what runs the code of the code interpreter: auto takes bubblewrap where that works, or else monty",
    )
    sandbox_python: File | None = _setting(
        None,
        "the Python that runs code under bubblewrap and landlock; default: that of `antiphon sandbox "
        "install`, or else the server's own",
    )
    sandbox_command: str | None = _setting(
        None, "with sandbox=command: what a Python is started by; {data} is the folder of its files"
    )
    sandbox_cell_s: Seconds = _setting(60.0, "how long one call may run code", unit="s", gt=0, le=3600)
    sandbox_memory_bytes: Bytes = _setting(
        1 << 30,  # numpy, pandas and matplotlib want more than half of that as addresses
        "most memory that code of a container may have; a container may ask for less",
        unit="bytes",
        ge=64 << 20,
    )
    max_container_bytes: Bytes = _setting(256 << 20, "files of a container", unit="bytes", gt=0)
    public_url: str | None = _setting(
        None, "where clients reach the server, for links in items; default: links without a host"
    )
    demo_web: Folder | None = _setting(
        None,
        "folder of documents (.md, .txt, .html) that web_search finds in place of the web, to try it",
    )

    # What it refuses
    max_body_bytes: Bytes = _setting(32 << 20, "largest request body", unit="bytes", gt=0)
    max_file_bytes: Bytes = _setting(
        512 << 20,  # the official limit
        "largest file that may be uploaded, in one piece or in parts",
        unit="bytes",
        gt=0,
    )
    max_audio_bytes: Bytes = _setting(
        25 << 20,  # the official limit
        "largest file of sound for /v1/audio",
        unit="bytes",
        gt=0,
    )
    max_audio_s: Seconds = _setting(
        3600.0,
        "longest sound for /v1/audio; an hour is 110 MiB of samples in memory, of four requests at once",
        unit="s",
        gt=0,
        le=86400,
    )
    max_arriving_bytes: Bytes = _setting(
        256 << 20, "request bodies that arrive at once, all together, before 503", unit="bytes", gt=0
    )
    max_connections: int | None = _setting(
        None, "open connections before 503; default: what the limit of descriptors leaves", gt=0
    )
    max_image_pixels: int = _setting(
        40_000_000,  # of today's cameras, and 160 MB while it is decoded
        "largest image that a model is shown; what is smaller is scaled to 2048 pixels along a side",
        unit="pixels",
        gt=0,
    )
    max_header_bytes: Bytes = _setting(
        64 << 10, "largest request line and headers together", unit="bytes", ge=1024
    )
    max_item_bytes: Bytes = _setting(
        16 << 20,  # the longest text that the official API takes, 10 Mi characters, and its escapes
        "largest item of a conversation, an input or a tool's output, as JSON",
        unit="bytes",
        ge=1024,
    )
    max_items_per_conversation: int = _setting(
        10_000, "items of one conversation; all of them are read at each turn in it", unit="items", gt=0
    )
    max_json_depth: int = _setting(128, "deepest nesting of a request body", unit="levels", ge=8, le=512)
    max_json_values: int = _setting(
        300_000, "most brackets and commas of a request body", unit="values", ge=1000
    )
    max_waiting: int = _setting(512, "requests that wait for the engine before 429", unit="requests", gt=0)
    max_waiting_tokens: int | None = _setting(
        None,
        "tokens of the prompts of these, together, before 429; a longer prompt may wait alone",
        unit="tokens",
        gt=0,
    )
    max_prompt_tokens: int | None = _setting(
        None, "longest prompt; beyond it 400; default: the context's length", unit="tokens", gt=0
    )
    max_output_tokens: int | None = _setting(
        None, "longest answer, whatever a request asks; default: up to the context", unit="tokens", gt=0
    )
    max_generations: int = _setting(
        1000, "a response asks its model this often at most: a loop of tools ends there", gt=0
    )
    max_tool_output_bytes: Bytes | None = _setting(
        None,
        "largest output of one call, a client's (400) or this server's (the model is told); default: "
        "max_item_bytes",
        unit="bytes",
        gt=0,
    )
    owner_limit: LimitWords = _setting(
        (),
        "what every owner may use that has no such limit of its own: NAME=NUMBER or MODEL:NAME=NUMBER, such "
        "as requests_per_minute=60 (repeatable); concurrent_... hold at each server by itself",
    )
    owner_service_tier: Tiers = _setting(
        (),
        "service tier that owners without tiers of their own may use (repeatable), the first one for "
        "requests that name none; default: default and flex where keys are needed, else all",
    )
    identifier_requests_per_minute: int | None = _setting(
        None,
        "requests a minute of each person for whom clients say that they ask (`safety_identifier`, `user`), "
        "before 429",
        unit="requests",
        gt=0,
    )
    max_queued: int = _setting(
        1000, "background responses of one owner that wait for their turn before 429", unit="responses", gt=0
    )
    max_live_runs: int | None = _setting(
        None,
        "responses of all owners that are under way, on all servers of the database, before 429: queued, at "
        "work, or waiting for their client",
        unit="responses",
        gt=0,
    )

    # How long it waits
    request_timeout_s: Seconds | None = _setting(
        None,
        "one generation may take this long, its turn in the queue included; default: for ever",
        unit="s",
        gt=0,
    )
    resume_grace_s: Seconds = _setting(
        60.0, "a stored run goes on this long without a reader", unit="s", ge=0
    )
    await_tool_outputs: bool = _setting(
        False,
        "whether stored responses, streamed or in the background, wait for the outputs of their client's "
        "tools where a request says nothing of it",
    )
    tool_timeout_s: Seconds = _setting(600.0, "a run waits this long for tool outputs", unit="s", gt=0)
    idempotency_ttl_s: Seconds = _setting(
        86400.0, "an Idempotency-Key and its reply are remembered this long", unit="s", gt=0
    )
    keepalive_s: Seconds = _setting(10.0, "silence on a stream before a comment is sent", unit="s", gt=0)
    send_timeout_s: Seconds = _setting(
        30.0, "a client that takes nothing for this long is cut", unit="s", gt=0
    )
    head_timeout_s: Seconds = _setting(
        15.0, "a request's line and headers may take this long to arrive before 408", unit="s", gt=0
    )
    body_timeout_s: Seconds = _setting(
        30.0,
        "a request body may take this long, and a second for every 32 KiB of it, before 408",
        unit="s",
        gt=0,
    )
    idle_timeout_s: Seconds = _setting(
        75.0,
        "a connection without a request is kept this long; longer than clients keep theirs",
        unit="s",
        gt=0,
    )
    websocket_s: Seconds = _setting(
        3600.0,  # the official limit
        "a WebSocket lasts this long, and then until nothing is under way on it",
        unit="s",
        gt=0,
    )
    step_timeout_s: Seconds = _setting(
        10.0,
        "an engine that computes one step for longer than this counts as dead, and the server ends",
        unit="s",
        gt=0,
        engines=_LOCAL,
    )
    tick_s: Seconds = _setting(
        0.0, "pause between chunks of the scripted engine", unit="s", ge=0, engines=_SCRIPTED
    )
    lease_s: Seconds = _setting(
        10.0,
        "of several servers on one database: when one dies, the others take up its runs after this long; "
        "give all of them the same value",
        unit="s",
        gt=0,
    )
    drain_grace_s: Seconds = _setting(30.0, "work in flight may take this long at SIGTERM", unit="s", ge=0)

    # What it costs
    price: Prices = _setting(
        (),
        "MODEL=INPUT/CACHED/OUTPUT: what a million tokens of a model cost, for /v1/organization/costs; "
        "* for every other model (repeatable)",
    )
    currency: Annotated[str, AfterValidator(_currency)] = _setting("usd", "currency of these prices")

    # What it hands out sealed
    sealing_key_s: Seconds = _setting(
        30 * 86400.0,
        "a key that the database holds seals reasoning this long; it opens what it sealed for ever",
        unit="s",
        gt=0,
    )
    sealing_key: SealingKeys = _setting(
        (),
        "a key of 128 hexadecimal digits that seals reasoning in place of those of the database (repeatable: "
        "the first seals, all open); other users of this machine can read flags, so --sealing-key-file is "
        "safer",
    )
    sealing_key_file: SealingKeyFile = _setting(
        None, "file of such keys, one a line, the first of which seals; # begins a comment"
    )

    # What it says
    default_openai_organization: HeaderValue | None = _setting(
        None, "header openai-organization of replies to clients that send none; default: no such header"
    )
    default_openai_version: HeaderValue = _setting(
        "2020-10-01",  # the official API's
        "header openai-version of replies to clients that send none",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", "least severe log lines to print"
    )
    log_format: Literal["text", "json"] = _setting(
        "text", "how a log line is written; json: an object with the request, owner, model and tokens"
    )
    log_prompts: bool = _setting(
        False, "log what each generation is asked, as the model reads it; never done unless asked for"
    )
    vllm_metrics: bool = _setting(
        False, "show metrics under vLLM's names too, for dashboards that were made for it"
    )
    otel: bool = _setting(
        False, "send spans of requests, generations and tools by OTLP, as the variables OTEL_* say"
    )
    otel_content: bool = _setting(False, "put what models and tools are told, and what they say, into spans")

    @property
    def has_several_processes(self) -> bool:
        """Whether server processes stand before an engine's."""
        return self.api_server_count > 1 or self.engine_process

    def of_entry(self, entry: ModelEntry) -> Config:
        """The configuration as it is for one of the models. Raises ConfigError for a value that a setting
        cannot have."""
        values = {name: getattr(self, name) for name in Config.model_fields}
        values |= {"models": None, "entries": ModelsFile(), "lora": ()}
        values |= {"api_server_count": 1, "engine_process": False}
        others = ("embedding_model", "rerank_model", "classification_model", "speech_model")
        values |= dict.fromkeys(others, ())
        values |= {"draft_model": None, "chat_template": None, **entry.settings}
        values |= {"engine": entry.engine, "served_model_name": (entry.id,)}
        values |= {"model": entry.path or SHIPPED_MODEL}
        if entry.use != "text":
            # An engine of other servers is none here: what is loaded is the model that generates nothing.
            values |= {f"{entry.use}_model": (f"{entry.id}={entry.path}",), "engine": "upstream"}
            values |= {"served_model_name": ("none",)}
        try:
            return Config(**values)
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_input=False)[0]
            told = first["msg"].removeprefix("Value error, ")
            raise ConfigError(f"{first['loc'][0]}: {told} (model {entry.id})") from None

    def saving_for(self, database: str | None) -> Config:
        """The same of a server whose database has this id, so that engines keep out of what others have
        saved."""
        return self.model_copy(update={"kv_disk_database": database})

    @property
    def serves_own_model(self) -> bool:
        """Whether the settings name a model: without models of a file there is one in any case."""
        chosen = self.engine != "local" or self.model != SHIPPED_MODEL or bool(self.served_model_name)
        return chosen or not any(entry.use == "text" for entry in self.entries)

    def dumped(self) -> dict[str, Any]:
        """What differs from the defaults, or follows from other settings where it is not given, and is no
        secret, as JSON values that `Config` takes back."""
        found = {}
        for name, field in Config.model_fields.items():
            value = getattr(self, name)
            secret = name.endswith(("api_key", "sealing_key")) or name == "db" or name in FROM_FILES
            if not secret and value != field.default:
                found[name] = [*value] if isinstance(value, tuple) else value
        return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}

    def __repr_args__(self) -> Iterator[tuple[str, str]]:
        """As it may be printed, in a traceback too."""
        return ((name, shown(getattr(self, name))) for name in type(self).model_fields)

    def secrets(self) -> list[str]:
        """The configured keys, in the clear."""
        return [key.get_secret_value() for key in self.api_key]

    def sealing_keys(self) -> tuple[bytes, ...]:
        """The operator's keys, of which the first seals and all open; none where the database has its own.
        Reads the file; ValueError where that cannot be used."""
        if self.sealing_key_file is not None:
            return read_sealing_key_file(self.sealing_key_file)
        return read_sealing_keys([key.get_secret_value() for key in self.sealing_key])

    @property
    def egress_policy(self) -> Egress:
        """Where requests may have the server connect to."""
        return Egress(self.egress, tuple(map(read_rule, self.egress_allow)))

    @property
    def db_file(self) -> Path | None:
        """The file of the database, where it is one."""
        path = self.db.partition(":///")[2].partition("?")[0] if self.db.startswith("sqlite") else ""
        return Path(path) if path else None

    @property
    def keeps_database(self) -> bool:
        """Whether the database is in the data folder, under its usual name."""
        return self.db_file == self.data / "antiphon.db"

    @property
    def flags(self) -> str:
        """What a command that is told to somebody has to say so that it finds the same database: empty, or
        flags behind a blank."""
        told = "" if self.data == default_data() else f" --data {shlex.quote(str(self.data))}"
        if self.keeps_database or self.names_database:  # a password is not told, so a flag would lack it
            return told
        return f"{told} --db {shlex.quote(masked(self.db))}"

    @property
    def installed_python(self) -> Path:
        """The Python that `antiphon sandbox install` makes."""
        return self.data / "sandbox-python" / "bin" / "python"

    @property
    def code_python(self) -> Path | None:
        """The Python that runs code of models; None: the server's own."""
        if self.sandbox_python is not None:
            return self.sandbox_python
        # Also one whose own Python has gone: then whoever looks at it says so.
        return self.installed_python if os.path.lexists(self.installed_python) else None

    @property
    def loopback(self) -> bool:
        """True when only this machine can connect."""
        return is_loopback(self.host)

    @property
    def led_to(self) -> str | None:
        """The setting that says of a server on loopback that somebody leads others to it; None without."""
        given = {"trusted_proxy": self.trusted_proxy, "allowed_host": self.allowed_host}
        return next((name for name, value in given.items() if value and self.loopback), None)


ENTRY_SETTINGS = frozenset(
    {
        *("lora", "chat_template", "trust_request_chat_template", "allow_special_tokens"),
        *("default_temperature", "default_max_output_tokens", "max_output_tokens", "max_prompt_tokens"),
        *("prompt_cache_key_salts", "request_timeout_s", "max_waiting", "max_waiting_tokens"),
    }
)
"""Settings that a model of the file may have otherwise, besides those that are of one kind of engine."""


def is_loopback(host: str) -> bool:
    """Whether an address (or `localhost`) is this machine's own."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


# ------------------------------------------------------------------------------------------------------------
# Settings as rows

SUBJECTS = {
    "host": "address, keys, browsers and TLS",
    "data": "what is kept, where and for how long",
    "engine": "the model",
    "dtype": "how the model is computed",
    "max_num_seqs": "how much is computed at once",
    "chat_template": "how the model is spoken to",
    "num_assistant_tokens": "speculative decoding",
    "upstream": "other servers as the engine",
    "tools": "tools, and what they may reach",
    "max_body_bytes": "limits",
    "resume_grace_s": "times",
    "default_openai_organization": "replies and logs",
}
"""What settings are about, by the first one of each subject; they are declared in this order."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as `antiphon config` and the flags show it."""

    name: str
    help: str
    unit: str
    repeatable: bool
    switch: bool  # the flag alone says true
    choices: tuple[str, ...]
    default: str  # printable
    engines: tuple[str, ...]  # those with which it has an effect; empty: all
    subject: str  # what it is about, with the settings before and after it

    @property
    def env(self) -> str:
        """Its environment variable."""
        return f"ANTIPHON_{self.name.upper()}"

    @property
    def flag(self) -> str:
        """Its command line flag."""
        return f"--{self.name.replace('_', '-')}"


def settings() -> list[Setting]:
    """All settings, in the order in which Config declares them."""
    defaults = Config()
    rows = []
    subject = ""
    for name, field in Config.model_fields.items():
        if name in NO_SETTINGS:
            continue
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        literal = get_origin(field.annotation) is Literal
        rows.append(
            Setting(
                name=name,
                help=field.description or "",
                unit=str(extra["unit"]),
                repeatable=get_origin(field.annotation) is tuple,
                switch=field.annotation is bool,
                choices=get_args(field.annotation) if literal else (),
                default=shown(getattr(defaults, name)),
                engines=tuple(str(extra["engines"]).split()),
                subject=(subject := SUBJECTS.get(name, subject)),
            )
        )
    return rows


def shown(value: Any) -> str:
    """A value as it may be printed: secrets masked, nothing and an empty text as a dash."""
    if isinstance(value, tuple):
        return ", ".join(shown(each) for each in value) or "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.15g}"
    return "-" if value is None or value == "" else masked(str(value))


# ------------------------------------------------------------------------------------------------------------
# Loading


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and per setting where its value came from.

    strangers: environment variables that begin with ANTIPHON_ and are no settings. file: that of the
    settings; None where there is none.
    """

    config: Config
    sources: Mapping[str, str]
    strangers: Sequence[str]
    file: Path | None

    def warnings(self) -> Iterator[str]:
        """A sentence for each of the strangers, with the setting that may have been meant."""
        for name in self.strangers:
            meant = nearest(name.removeprefix("ANTIPHON_").lower(), Config.model_fields)
            hint = f"; did you mean ANTIPHON_{meant.upper()}?" if meant else ""
            yield f"the environment variable {name} is no setting and is ignored{hint}"

    def without_effect(self) -> Iterator[str]:
        """A sentence for each setting that has no effect with the engine that is configured.

        Raises ConfigError where no engine was chosen and a setting is of another one than the default: the
        server would run another model than was asked for.
        """
        chosen = self.config.engine
        for row in settings():
            idle = self.sources[row.name] != "default" and row.engines and chosen not in row.engines
            if not idle or shown(getattr(self.config, row.name)) == row.default:
                continue
            told = f"{row.name} ({self.sources[row.name]}) has no effect with the engine {chosen}"
            wanted = " or ".join(f"--engine {engine}" for engine in row.engines)
            if self.sources["engine"] == "default":
                raise ConfigError(f"{told}, which is the default: give {wanted} too")
            yield f"{told}: it is read with {wanted} only"


def load(flags: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None) -> Loaded:
    """Read flags (None: not given), environment and `$ANTIPHON_DATA/antiphon.toml`; ConfigError on the first
    fault."""
    env = os.environ if env is None else env
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    rows = settings()
    values: dict[str, Any] = {}
    sources = {row.name: "default" for row in rows}

    def take(found: Mapping[str, Any], source: Mapping[str, str]) -> None:
        for name, value in found.items():
            values[name] = value
            sources[name] = source[name]

    from_env = {row.name: env[row.env] for row in rows if env.get(row.env)}
    data = _place("data", given.get("data") or from_env.get("data") or default_data())
    if os.path.isfile(data):
        raise ConfigError(f"data: {data} is a file, and a folder is needed")
    file = data / FILE_NAME
    text = _read_file(file)
    from_file = _parsed(file, text)
    tables = {name: from_file.pop(name) for name in TABLES if name in from_file}
    listed = from_file.pop(MODELS_TABLE) if isinstance(from_file.get(MODELS_TABLE), list) else None
    names = {row.name for row in rows}
    for name in sorted(set(from_file) - (names - {"data"})):
        meant = None if name == "data" else nearest(name.replace("-", "_"), names - {"data"})
        meant = "owner_limit" if name == "limits" else meant
        hint = f"; did you mean '{meant}'?" if meant else ""
        raise ConfigError(f"{file}{_line(text, name)}: '{name}' is not a setting that a file can hold{hint}")
    take(from_file, {name: f"file {file}" for name in from_file})
    take(from_env, {row.name: f"environment {row.env}" for row in rows})
    take(given, {row.name: f"flag {row.flag}" for row in rows})
    for name, table in tables.items():
        try:
            values[name] = TABLES[name](table, env)
        except ValueError as exc:
            place = _line(text, str(exc).partition(":")[0])
            raise ConfigError(f"{file}{place}: {exc}") from None
    models, listed = _listed(_place("models", values.get("models")) or entries_beside(data), listed, file)
    values["entries"] = _entries(listed, models, env)
    values["names_database"] = "db" in from_file and sources["db"].startswith("file")
    try:
        config = Config(**values)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0])
        source = sources.get(name, "default")
        place = _line(text, name) if name in from_file and source.startswith("file") else ""
        raise ConfigError(f"{name} ({source}{place}): {first['msg'].removeprefix('Value error, ')}") from None
    for index, entry in enumerate(config.entries):
        try:
            config.of_entry(entry)
        except ConfigError as exc:
            place = f"{MODELS_TABLE}.{index}.{str(exc).partition(':')[0]}"
            raise ConfigError(f"{models}{_line(_read_file(models), place)}: {exc}") from None
    known = {row.env for row in rows} | CLIENT_VARIABLES
    strangers = sorted(n for n in env if n.startswith("ANTIPHON_") and n not in known)
    return Loaded(config, sources, strangers, file if os.path.exists(file) else None)


def rereading(flags: Mapping[str, Any], first: Loaded) -> Callable[[], Config]:
    """What reads the settings again while a server runs, with the flags of its start; raises ConfigError.

    first: how they were read before. A file of settings that was there at the last reading and is gone is a
    fault: the keys and limits in it would all end, by a slip or because an editor is about to write it.
    """
    file = first.file

    def reread() -> Config:
        nonlocal file
        loaded = load(flags)
        if file is not None and loaded.file is None:
            raise ConfigError(f"{file} is gone, and what it said stays in force; an empty file ends it")
        file = loaded.file
        return loaded.config

    return reread


def _place(name: str, value: Any) -> Any:
    """The path in a setting that is needed before all are read. Raises ConfigError."""
    try:
        return _path(value)
    except ValueError as exc:
        raise ConfigError(f"{name}: {exc}") from None


def _listed(models: Path | None, listed: Any, file: Path) -> tuple[Path, Any]:
    """The file that lists models, and its list: one of their own, or `file` with what stands in it."""
    if models is None:
        return file, listed
    if listed is not None:
        raise ConfigError(f"both {models} and [[{MODELS_TABLE}]] in {file} list models: keep one of them")
    if not os.path.isfile(models):  # which raises nothing where the folder may not be entered
        raise ConfigError(f"models: there is no file {models}")
    found = _parsed(models, text := _read_file(models))
    if (strangers := found.keys() - {MODELS_TABLE}) or not found:
        what = f"'{min(strangers)}' is not known here" if strangers else "it is empty"
        place = _line(text, f"{min(strangers)}.0") if strangers else ""
        raise ConfigError(f"{models}{place}: {what}: each model is a table [[{MODELS_TABLE}]]")
    return models, found[MODELS_TABLE]


def _entries(listed: Any, file: Path, env: Mapping[str, str]) -> ModelsFile:
    """The models of a file's list."""
    try:
        _check_names(listed)
        return ModelsFile() if listed is None else read_entries(listed, env)
    except ValueError as exc:
        place = _line(_read_file(file), str(exc).partition(":")[0])
        raise ConfigError(f"{file}{place}: {exc}") from None


def _check_names(tables: Any) -> None:
    """Raise ValueError for a name in the tables of models that no model has a setting of."""
    known = {row.name for row in settings() if row.engines} - {"model", "lora"} | ENTRY_SETTINGS
    known |= ModelEntry.model_fields.keys()
    for index, table in enumerate(tables if isinstance(tables, list) else ()):
        for name in table if isinstance(table, dict) else ():
            if name not in known:
                meant = nearest(name, known)
                hint = f"; did you mean '{meant}'?" if meant else ""
                raise ValueError(f"{MODELS_TABLE}.{index}.{name}: no setting of a model{hint}")


def _read_file(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except FileNotFoundError:
        return ""
    except PermissionError as exc:
        raise ConfigError(why_barred(file) or f"{file}: {exc}") from None
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{file}: {exc}") from None


def _parsed(file: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError as exc:  # which says the line itself
        raise ConfigError(f"{file}: {exc}") from None


_TABLE = re.compile(r"\s*(\[+)\s*([^\]]+?)\s*\]")
_KEY = re.compile(r"""\s*([\w."' -]+?)\s*=""")


def _line(text: str, place: str) -> str:
    """Where a setting stands in a file, as `, line 3`: of a place such as `mcp.servers.desk.url` or
    `models.0.path`, the line of as much of it as has one; nothing where none has. TOML's parser keeps no
    lines of what is well formed."""
    table, found, listed = "", (0, 0), dict[str, int]()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _TABLE.match(line):
            at = _unquoted(header[2])
            if header[1] == "[[":
                listed[at] = listed.get(at, -1) + 1
            for name, index in listed.items():  # a table is in the last one of a list
                if f"{at}.".startswith(f"{name}."):
                    at = f"{name}.{index}{at[len(name) :]}"
            table = at
        elif key := _KEY.match(line):
            at = f"{table}.{_unquoted(key[1])}" if table else _unquoted(key[1])
        else:
            continue
        if f"{place}.".startswith(f"{at}."):
            found = max(found, (len(at), number))
    return f", line {found[1]}" if found[1] else ""


def _unquoted(name: str) -> str:
    return name.replace('"', "").replace("'", "")
