"""The table `[images]`, and what `antiphon doctor` says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.cli.doctor import CHECKS
from server.config import Config, ConfigError, load
from server.images import ImagesSettings
from server.process.tools_registry import read_registry
from tests.support.loopback_images import loopback_images
from tools import GENERATE


def test_the_table_is_read_with_its_secret(tmp_path: Path) -> None:
    (tmp_path / "antiphon.toml").write_text(
        '[images]\nurl = "http://127.0.0.1:1/v1"\nmodel = "flux"\napi_key = { env = "IMAGE_KEY" }\n'
        "timeout_s = 20\nidempotent = true\n"
    )
    config = load({"data": str(tmp_path)}, {"IMAGE_KEY": "s3cret"}).config
    generator = config.images.generator(config.max_item_bytes)
    assert generator is not None and (generator.model, generator.api_key) == ("flux", "s3cret")
    assert "s3cret" not in repr(config) and "s3cret" not in repr(generator)
    spec = read_registry(config)[GENERATE]
    assert spec.idempotent and spec.timeout_s > 20
    assert GENERATE not in read_registry(Config(data=tmp_path))


def test_no_image_is_larger_than_what_clients_can_send_back() -> None:
    settings = ImagesSettings(url="http://127.0.0.1:1")
    whole, small = settings.generator(16 << 20), settings.generator(1 << 20)
    assert whole is not None and whole.max_bytes == 8 << 20
    assert small is not None and small.max_bytes * 4 // 3 < 1 << 20


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ('url = "localhost"', "images.url: 'localhost' is no address"),
        ('model = "flux"', "model: of which server? Give url"),
        ('url = "http://a"\napi_key = { env = "NONE" }', "images.api_key: there is no variable 'NONE'"),
        ('url = "http://a"\napi_key = "s3\\nc"', "images.api_key: a header's value is printable ASCII"),
        ('url = "http://a"\ntimeout_s = 0', "images.timeout_s: "),
        ('url = "http://a"\nprovider = "x"', "images.provider: "),
    ],
)
def test_a_wrong_table_is_refused_by_its_place(tmp_path: Path, table: str, fault: str) -> None:
    (tmp_path / "antiphon.toml").write_text(f"[images]\n{table}\n")
    with pytest.raises(ConfigError) as refused:
        load({"data": str(tmp_path)}, {})
    assert fault in str(refused.value) and "s3" not in str(refused.value)


async def test_doctor_asks_for_no_image(tmp_path: Path) -> None:
    check = CHECKS["images"]
    assert "no server of images is configured" in (await check(Config(data=tmp_path)))[1]
    async with loopback_images() as images:
        config = Config(data=tmp_path, images=ImagesSettings(url=images.url, model="flux"))
        verdict, said = await check(config)
        assert verdict == "ok" and said.startswith(f"flux of {images.url}/v1/images/generations answers")
        assert "is not made again" in said
        images.status = 401
        verdict, said = await check(config)
        assert verdict == "note" and "its api_key is missing or wrong" in said
        assert images.asked == []
    verdict, said = await check(config)
    assert verdict == "note" and "127.0.0.1" in said
