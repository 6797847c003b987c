"""Settings: four sources in order of rank, one line for a fault, and no setting that nothing reads."""

from __future__ import annotations

import ast
import pwd
import re
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

import pytest

from engine import EngineConfig, LoadError
from server import config as module
from server.config import Config, ConfigError, is_loopback, load, rereading, settings, shown
from server.model_registry import chat_template
from server.settings import ModelEntry
from tests.support.permissions import barred


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"ANTIPHON_DATA": str(tmp_path)}


def test_limits_of_every_owner_are_checked() -> None:
    assert load({"owner_limit": ["tokens_per_day=5"]}, {}).config.owner_limit == ("tokens_per_day=5",)
    with pytest.raises(
        ConfigError, match=r"owner_limit \(flag --owner-limit\): there is no limit 'token_per"
    ):
        load({"owner_limit": ["token_per_day=5"]}, {})


def test_a_file_that_is_gone_is_a_fault_for_whoever_reads_it_again(tmp_path: Path) -> None:
    file, flags = tmp_path / "antiphon.toml", {"data": str(tmp_path)}
    reread = rereading(flags, load(flags))
    assert reread().owner_limit == ()  # there was none
    for limit in ("tokens_per_day=5", "tokens_per_day=6"):
        file.write_text(f"owner_limit = ['{limit}']")
        assert reread().owner_limit == (limit,)
        file.unlink()
        for _ in range(2):
            with pytest.raises(ConfigError, match=f"{file} is gone"):
                reread()
    file.touch()
    assert reread().owner_limit == ()


def test_flag_over_environment_over_file_over_default(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "antiphon.toml").write_text('port = 1\nkeepalive_s = 5\nhost = "127.0.0.2"\n')
    loaded = load({"port": "3"}, {**env, "ANTIPHON_PORT": "2", "ANTIPHON_KEEPALIVE_S": "7.5"})
    assert (loaded.config.port, loaded.config.keepalive_s, loaded.config.host) == (3, 7.5, "127.0.0.2")
    assert loaded.sources["port"] == "flag --port"
    assert loaded.sources["keepalive_s"] == "environment ANTIPHON_KEEPALIVE_S"
    assert loaded.sources["host"] == f"file {tmp_path / 'antiphon.toml'}"
    assert loaded.sources["data"] == "environment ANTIPHON_DATA"
    assert loaded.sources["dtype"] == "default"


def test_the_database_follows_the_data_folder(tmp_path: Path) -> None:
    config = load({"data": str(tmp_path / "a")}, {}).config
    assert config.db == f"sqlite+aiosqlite:///{tmp_path}/a/antiphon.db"
    assert load({"db": "sqlite+aiosqlite:////b.db"}, {}).config.db == "sqlite+aiosqlite:////b.db"
    assert Config(data=Path("~/x")).data == Path("~/x").expanduser()


def test_a_default_folder_that_may_not_be_entered_bars_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with barred(tmp_path):
        assert str(tmp_path) in next(row.default for row in settings() if row.name == "data")
        assert load({"data": "/nowhere"}, {}).config.data == Path("/nowhere")
        with pytest.raises(
            ConfigError, match=r"^the user .* cannot enter the folder /.*, which belongs to the user "
        ):
            load({}, {})


def test_a_user_without_a_home_names_the_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: object) -> NoReturn:
        raise KeyError

    for name in ("HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("getpwuid", "getpwnam"):
        monkeypatch.setattr(pwd, name, unknown)
    assert next(row.default for row in settings() if row.name == "data").startswith("~")
    assert load({"data": "/nowhere"}, {}).config.flags == " --data /nowhere"
    for flags, told in (
        ({}, "data: there is no home folder for the ~ of '~/"),
        ({"data": "~nouser/x"}, "data: there is no home folder for the ~ of '~nouser/x'"),
        ({"models": "~/models.toml"}, "models: there is no home folder"),
        ({"db": "sqlite:///~/x.db"}, "db (flag --db): there is no home folder"),
        ({"tools": "~/tools.toml"}, "tools (flag --tools): there is no home folder"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(told)}"):
            load({"data": "/nowhere"} | flags if flags else {}, {})


def test_a_command_that_is_told_has_no_database_that_the_folder_names(tmp_path: Path) -> None:
    """A password is not told: with the flag the command would try one of three stars."""
    db = "postgresql+asyncpg://ann:secret@h/x"
    (tmp_path / "antiphon.toml").write_text(f'db = "{db}"\n')
    data = {"data": str(tmp_path)}
    assert load(data, {}).config.flags == f" --data {tmp_path}"
    other = f" --data {tmp_path} --db 'postgresql+asyncpg://ann:***@h/other'"
    assert load({**data, "db": db.replace("/x", "/other")}, {}).config.flags == other


def test_a_file_of_models_that_may_not_be_looked_up_is_told(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.touch()
    with barred(tmp_path), pytest.raises(ConfigError, match=f"models: there is no file {file}"):
        load({"data": "/nowhere", "models": str(file)}, {})


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+aiosqlite"])
def test_a_database_file_is_named_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load({"db": f"{scheme}:///data/x.db?timeout=5"}, {}).config
    assert config.db == f"sqlite+aiosqlite:///{tmp_path}/data/x.db?timeout=5"
    assert config.db_file == tmp_path / "data" / "x.db"
    assert load({"db": "postgresql+asyncpg://h/x"}, {}).config.db == "postgresql+asyncpg://h/x"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("sqlite://", "the database must be a file"),
        ("sqlite:///", "the database must be a file"),
        ("sqlite:///:memory:", "the database must be a file"),
        ("sqlite://data/x.db", "the database must be a file"),
        ("mysql://ann:hush@h/x", "only sqlite+aiosqlite:///PATH and postgresql+asyncpg:// are supported"),
        ("postgres://ann:hush@h/x", "write postgresql+asyncpg://"),
        ("postgresql+psycopg2://ann:hush@h/x", "PostgreSQL is reached by postgresql+asyncpg://"),
        ("nonsense", "not a database URL"),
    ],
)
def test_a_database_that_no_server_could_open_is_no_setting(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"db (environment ANTIPHON_DB): {told}")) as refused:
        load({}, {"ANTIPHON_DB": url})
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        ("4096", 4096),
        ("64K", 64 << 10),
        ("2m", 2 << 20),
        ("1.5G", 3 << 29),
        ("4 GiB", 4 << 30),
        ("1T", 1 << 40),
    ],
)
def test_bytes_may_have_a_suffix(env: dict[str, str], written: str, num_bytes: int) -> None:
    sizes = [row.name for row in settings() if row.unit == "bytes" and row.name != "sandbox_memory_bytes"]
    assert "kv_cache_bytes" in sizes and "max_bytes_per_owner" in sizes
    config = load(dict.fromkeys(sizes, written), env).config
    assert {getattr(config, name) for name in sizes} == {num_bytes}
    from_env = load({}, {**env, "ANTIPHON_KV_CACHE_BYTES": written}).config
    assert from_env.kv_cache_bytes == num_bytes


@pytest.mark.parametrize("written", ["4X", "4GB", "G", "", "-1G", "four"])
def test_what_is_no_number_of_bytes_is_refused_with_an_example(env: dict[str, str], written: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_bytes \(flag --kv-cache-bytes\).*2M, 4G"):
        load({"kv_cache_bytes": written}, env)


def test_more_bytes_than_can_be_counted_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_bytes \(flag --kv-cache-bytes\).*can be counted"):
        load({"kv_cache_bytes": "9" * 309 + "K"}, env)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("90", 90), ("1.5", 1.5), ("30s", 30), ("5m", 300), ("0.5h", 1800), ("1 h", 3600)],
)
def test_a_time_may_have_a_unit(env: dict[str, str], written: str, seconds: float) -> None:
    times = [row.name for row in settings() if row.unit == "s"]
    assert "retention_s" in times and "request_timeout_s" in times
    for name in times:
        try:
            config = load({name: written}, env).config
        except ConfigError as refused:  # it is out of the bounds of this one
            assert "no time" not in str(refused)
        else:
            assert getattr(config, name) == seconds, name
    assert load({}, {**env, "ANTIPHON_RETENTION_S": "7d"}).config.retention_s == 7 * 86400


@pytest.mark.parametrize("written", ["4x", "d", "", "-1d", "four", "1d2h", "inf", "nan"])
def test_what_is_no_time_is_refused_with_an_example(env: dict[str, str], written: str) -> None:
    with pytest.raises(ConfigError, match=r"retention_s \(flag --retention-s\).*5m, 12h"):
        load({"retention_s": written}, env)


def test_lists_come_as_repeated_flags_or_with_commas(env: dict[str, str]) -> None:
    assert load({"served_model_name": ["a", "b"]}, env).config.served_model_name == ("a", "b")
    from_env = load({}, {**env, "ANTIPHON_SERVED_MODEL_NAME": "a, b,"}).config
    assert from_env.served_model_name == ("a", "b")


def test_the_key_for_an_upstream_is_what_a_header_can_hold(env: dict[str, str]) -> None:
    key = load({"engine": "upstream", "upstream_api_key": "sk-1\r\n"}, env).config.upstream_api_key
    assert key is not None and key.get_secret_value() == "sk-1"
    with pytest.raises(ConfigError) as refused:
        load({"engine": "upstream", "upstream_api_key": "sk-sec\rret"}, env)
    assert "printable ASCII" in str(refused.value) and "sk-" not in str(refused.value)


@pytest.mark.parametrize("keys", [[""], ["sk-1", " "]])
def test_an_empty_key_is_refused(env: dict[str, str], keys: list[str]) -> None:
    """As `--api-key "$KEY"` gives one where KEY is unset: nobody could send it."""
    with pytest.raises(ConfigError, match="a key is empty"):
        load({"api_key": keys}, env)


def test_secrets_are_never_shown(env: dict[str, str]) -> None:
    loaded = load({}, {**env, "ANTIPHON_API_KEY": "sk-secret-1,sk-secret-2"})
    assert loaded.config.secrets() == ["sk-secret-1", "sk-secret-2"]
    assert "secret" not in shown(loaded.config.api_key)
    assert "sk-secret" not in repr(loaded.config)
    assert shown("postgresql+asyncpg://ann:hunter2@db/x") == "postgresql+asyncpg://ann:***@db/x"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+asyncpg://ann:hush@db/x",
        "postgresql+asyncpg://ann:a hush/with:@odd@db/x",
        "postgresql+asyncpg://db/x?user=ann&password=hush&ssl=require",
        "http://hush@gpu:8000/v1",
        "http://:hush@gpu:8000",
        "https://gpu/v1?api_key=hush",
    ],
)
def test_a_password_in_a_url_is_never_shown(env: dict[str, str], url: str) -> None:
    assert "hush" not in shown(url) and shown(url).startswith(url[: url.index("//") + 2])
    for flags in ({"db": url} if url.startswith("postgresql") else {}, {"upstream": ["http://plain:1", url]}):
        loaded = load(flags, env)
        assert "hush" not in repr(loaded.config) and "hush" not in str(loaded)
    for plain in ("postgresql+asyncpg://ann@db/x?ssl=require", "http://gpu:8000/v1", "owner@example.org"):
        assert shown(plain) == plain


@pytest.mark.parametrize(
    ("flags", "extra", "message"),
    [
        ({"port": "70000"}, {}, "port (flag --port)"),
        ({}, {"ANTIPHON_PORT": "eight"}, "port (environment ANTIPHON_PORT)"),
        ({"dtype": "int3"}, {}, "dtype (flag --dtype)"),
        ({}, {"ANTIPHON_KEEPALIVE_S": "0"}, "keepalive_s (environment"),
        ({}, {"ANTIPHON_KEEPALIVE_S": "nan"}, "keepalive_s (environment"),
        ({"lora": ["tone"]}, {}, "lora (flag --lora): 'tone' is not of the form NAME=PATH"),
    ],
)
def test_a_fault_names_the_setting_and_its_source(
    env: dict[str, str], flags: dict[str, str], extra: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags, {**env, **extra})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("# a comment\nhost = '::1'\nport = 'x'\n", 3),
        ("\nprot = 1\n", 2),
        ("host = '::1'\nport = \n", 2),
        ("tick_s = 1\n\n[mcp.servers.desk]\ncommand = ['a']\ntrust = 'perhaps'\n\n[web]\n", 5),
        ("[mcp.servers.desk]\ntrust = true\n", 1),
        ("[mcp.servers]\ndesk = { command = ['a'], trust = 'perhaps' }\n", 2),
    ],
)
def test_a_fault_of_the_file_is_told_with_its_line(
    env: dict[str, str], tmp_path: Path, text: str, line: int
) -> None:
    (tmp_path / "antiphon.toml").write_text(text)
    with pytest.raises(ConfigError, match=rf"antiphon\.toml.*\bline {line}\b"):
        load({}, env)


def test_what_wins_over_the_file_is_not_blamed_on_it(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "antiphon.toml").write_text("port = 1\n")
    with pytest.raises(ConfigError, match=r"^port \(flag --port\): "):
        load({"port": "x"}, env)


@pytest.mark.parametrize("text", ["prot = 1", "data = '/x'", "port = ", "port = 'x'"])
def test_a_faulty_file_is_named(env: dict[str, str], tmp_path: Path, text: str) -> None:
    (tmp_path / "antiphon.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"antiphon\.toml"):
        load({}, env)


def test_what_looks_like_a_setting_and_is_none_is_told(env: dict[str, str]) -> None:
    loaded = load({}, {**env, "ANTIPHON_PROT": "1", "OTHER": "1", "ANTIPHON_URL": "http://127.0.0.1:1"})
    assert loaded.strangers == ["ANTIPHON_PROT"]
    (warning,) = loaded.warnings()
    assert "ANTIPHON_PROT" in warning and warning.endswith("did you mean ANTIPHON_PORT?")
    (warning,) = load({}, {**env, "ANTIPHON_ZZZZZZZZ": "1"}).warnings()
    assert warning.endswith("is no setting and is ignored")


def test_a_key_of_the_file_that_is_no_setting_is_told_with_the_one_that_was_meant(
    env: dict[str, str], tmp_path: Path
) -> None:
    for written, meant in (("prot", "port"), ("max-body-byte", "max_body_bytes")):
        (tmp_path / "antiphon.toml").write_text(f"{written} = 1\n")
        with pytest.raises(ConfigError, match=f"'{written}' is not .*; did you mean '{meant}'\\?"):
            load({}, env)
    (tmp_path / "antiphon.toml").write_text("zzzzzzzz = 1\n")
    with pytest.raises(ConfigError, match=r"hold$"):
        load({}, env)


@pytest.mark.parametrize(
    ("flags", "engine"),
    [
        ({"upstream": ["http://127.0.0.1:1"]}, "upstream"),
        ({"upstream_model": "big"}, "upstream"),
        ({"tick_s": "1"}, "scripted"),
    ],
)
def test_settings_of_another_engine_than_the_default_are_refused_until_one_is_chosen(
    env: dict[str, str], flags: dict[str, str], engine: str
) -> None:
    (name,) = flags
    with pytest.raises(ConfigError, match=f"{name} .* no effect with the engine local.* --engine {engine}"):
        list(load(flags, env).without_effect())
    assert list(load({**flags, "engine": engine}, env).without_effect()) == []
    (warning,) = load({**flags, "engine": "local"}, env).without_effect()
    assert warning.startswith(f"{name} (flag --") and f"--engine {engine} only" in warning


def test_settings_of_the_model_are_told_to_have_no_effect_on_another_engine(env: dict[str, str]) -> None:
    given = {"num_threads": "2", "model": "m", "device": "auto", "port": "1"}
    warnings = list(load({**given, "engine": "scripted"}, env).without_effect())
    assert [warning.split()[0] for warning in warnings] == ["model", "num_threads"]
    assert "--engine local or --engine upstream only" in warnings[0]
    assert list(load({**given, "engine": "local"}, env).without_effect()) == []


def test_every_setting_of_a_local_engine_alone_says_so() -> None:
    of_the_engine = {field.name for field in fields(EngineConfig)} & {row.name for row in settings()}
    shared = {"max_waiting", "max_waiting_tokens", "chat_template", "allow_special_tokens"}
    marked = {row.name for row in settings() if row.engines and "local" in row.engines}
    assert marked == of_the_engine - shared


def test_numbers_are_shown_as_a_reader_writes_them() -> None:
    assert [shown(value) for value in (2_592_000.0, 0.4, 60.0)] == ["2592000", "0.4", "60"]


def test_loopback() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"):
        assert is_loopback(host)
    for host in ("0.0.0.0", "::", "192.168.1.1", "example.com", ""):
        assert not is_loopback(host)


def test_every_setting_has_words_and_every_time_and_size_a_unit() -> None:
    for row in settings():
        assert row.help and row.help[-1] != ".", row.name
        if row.name.endswith("_s"):
            assert row.unit == "s", row.name
        if row.name.endswith("_bytes"):
            assert row.unit == "bytes", row.name
        assert row.env == f"ANTIPHON_{row.name.upper()}"


def test_every_setting_is_read_somewhere() -> None:
    """A setting that is accepted, shown and ignored would be a lie."""
    read = set()
    for file in (Path(module.__file__).parent).rglob("*.py"):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and "config" in ast.unparse(node.value):
                read.add(node.attr)
    own = {
        "api_key",
        "sealing_key",
        "host",
        "db",
        "data",
        "models",
        "engine_process",
    }  # read by Config itself
    own |= {field.name for field in fields(EngineConfig)}  # handed to the engine by their names
    assert {row.name for row in settings()} - own <= read


def test_a_chat_template_is_a_file_or_the_template_itself(tmp_path: Path) -> None:
    inline = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert chat_template(load({"chat_template": inline}, env={}).config) == inline
    (tmp_path / "own.jinja").write_text(inline)
    assert chat_template(load({"chat_template": str(tmp_path / "own.jinja")}, env={}).config) == inline
    with pytest.raises(LoadError):
        chat_template(load({"chat_template": str(tmp_path / "none.jinja")}, env={}).config)


def test_an_engine_in_another_process_knows_whose_kv_it_saves() -> None:
    config = Config().saving_for("a" * 32)
    assert Config(**config.dumped()).kv_disk_database == "a" * 32
    assert config.of_entry(ModelEntry(name="m", engine="scripted")).kv_disk_database == "a" * 32
    assert "kv_disk_database" not in {row.name for row in settings()}


def test_data_is_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=f"^data: {file} is a file, and a folder is needed$"):
        load({"data": file}, {})
