"""Which characters the bytes of a text stand for."""

from __future__ import annotations

import pytest

from tools.documents import read_document

OTHERS = [
    ("cp1251", "Сегодня хорошая погода, и мы пойдём гулять в парк."),
    ("cp1251", "имя;город\nИван;Москва\nМария;Казань"),
    ("cp1251", "x" * 100_000 + "\n" + "Последняя строка отчёта за прошлый год."),
    ("koi8_r", "имя;город\nИван;Москва"),
    ("cp866", "Сегодня хорошая погода, и мы пойдём гулять в парк."),
    ("cp932", "これは日本語のテキストです。今日は良い天気です。"),
    ("cp932", "名前,住所\n山田太郎,東京都\n鈴木花子,大阪府"),
    ("cp932", "Pythonは非常に高速なWebサーバーです。APIの使い方を説明します。"),
    ("euc_jp", "これは日本語のテキストです。今日は良い天気です。"),
    ("gb18030", "姓名,城市\n张三,北京\n李四,上海"),
    ("big5", "這是一個中文文字檔，今天天氣很好。"),
    ("cp949", "이름,도시\n김철수,서울\n이영희,부산"),
    ("cp1253", "όνομα;πόλη\nΓιώργος;Αθήνα"),
    ("cp1255", "זהו טקסט בעברית לבדיקה. היום מזג האוויר יפה."),
    ("cp1256", "هذا نص باللغة العربية للاختبار. الطقس جميل اليوم."),
    ("cp874", "นี่คือข้อความภาษาไทยสำหรับทดสอบ"),
    ("utf-16-le", "name;city\nJürgen;Köln"),
    ("utf-16-be", "It’s “so”, she said."),
]

WESTERN = [
    "Grüße",
    "name;city\nJürgen;Köln",
    "ÜBER STRASSEN, ÄRZTE UND ÖFEN",
    "L'été dernier, nous étions à la mer ; c'était très agréable, où que l'on aille.",
    "NÃO É AÇÃO, INFORMAÇÕES E OPÇÕES",
    "nombre,país\nMuñoz,España\nPeña,Panamá",
    "Rødgrød med fløde på Ærø",
    "nafn,staður\nÞórður,Reykjavík",
    "It’s here – “smart quotes” and a dash…",
    "price\n5 €\n21 °C\n10½ %",
    "Ñ\nÉ\nÜ\n½¼¾ ×÷",
    "ÀÂÇÉÈÊËÎÏÔÛÙ àáâãäåæçèéêë",
    "½ ¼ ¾ × ÷ § ¶ © ® ™ € £ ¥ ¢ ¿ ¡ ª º ° ± µ",
    "Rapport d'activité\n" + "·" * 60,
    "à\xa0b\xa0c",
]


@pytest.mark.parametrize(("encoding", "text"), OTHERS)
async def test_a_text_in_another_script_is_read_in_its_encoding(encoding: str, text: str) -> None:
    assert (await read_document(text.encode(encoding), "a.txt")).text == text


@pytest.mark.parametrize("text", WESTERN)
async def test_a_text_in_latin_letters_is_windows_1252(text: str) -> None:
    assert (await read_document(text.encode("cp1252"), "a.txt")).text == text


@pytest.mark.parametrize("text", ["Привет мир", "銷售報告"])
async def test_what_is_not_sure_is_not_guessed(text: str) -> None:
    data = text.encode("gb18030")
    assert (await read_document(data, "a.txt")).text == data.decode("cp1252")


@pytest.mark.parametrize("text", ["N\bNA\bAME", "dir *.txt\r\n\x1a"])
async def test_backspaces_and_the_end_of_a_text_of_dos_are_no_sign_of_a_binary_file(text: str) -> None:
    shown = text.replace("\b", "").replace("\r\n\x1a", "")
    assert (await read_document(text.encode(), "a.txt")).text == shown
