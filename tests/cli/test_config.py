"""`snugvl config` and its file: what it takes, what it refuses, and what comes first."""

from collections.abc import Callable
from pathlib import Path

import pytest

from snugvl.backends.process.supervised import SupervisedEngine  # before `served` replaces what it imports
from snugvl.cli import config, options, session
from snugvl.cli.app import run
from tests.cli.conftest import Served
from tests.command import Ran
from tests.tasks.fake import FakeBackend

Run = Callable[..., Ran]


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "snugvl" / "config.toml"


def written(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch, backend: FakeBackend) -> list[options.ModelChoice]:
    """What would have been loaded."""
    from snugvl.model import Model

    found: list[options.ModelChoice] = []

    def load(choice: options.ModelChoice) -> Model:
        found.append(choice)
        backend.reopen()
        return Model(backend)

    monkeypatch.setattr(session, "load_model", load)
    return found


def test_set_get_unset_path_show(snugvl: Run, file: Path) -> None:
    assert snugvl("config", "path").out == f"{file}\n"
    assert "doesn't exist yet" in snugvl("config", "show").err
    said = {"model": '"Qwen/a"', "serve.port": "9000", "memory": '"4GiB"', "quiet": "true"}
    for key, value in said.items():
        told = f"snugvl: {key} = {value} is set in {file}\n"
        assert snugvl("config", "set", key, value.strip('"')) == Ran(0, "", told)
    assert file.read_text() == 'model = "Qwen/a"\nmemory = "4GiB"\nquiet = true\n[serve]\nport = 9000\n'
    assert file.stat().st_mode & 0o077 == 0
    assert snugvl("config", "show").out == file.read_text()
    assert snugvl("config", "get", "serve.port").out == "9000\n"
    assert snugvl("config", "get", "quiet").out == "true\n"
    assert snugvl("config", "unset", "memory").code == 0
    assert snugvl("config", "get", "memory").code == 3
    assert snugvl("config", "unset", "memory").code == 3


def test_a_key_of_a_server_is_kept_and_not_shown(snugvl: Run, file: Path) -> None:
    assert snugvl("config", "set", "api-key", "sk-secret") == Ran(
        0, "", f"snugvl: api-key is set in {file}\n"
    )


def test_comments_stay(snugvl: Run, file: Path) -> None:
    written(file, '# mine\nmodel = "a/b"  # old\n\n[serve] # server\n# its port\nport = 1\n')
    assert snugvl("config", "set", "serve.port", "2").code == 0
    assert snugvl("config", "set", "model", "c/d").code == 0
    assert file.read_text() == '# mine\nmodel = "c/d"\n\n[serve] # server\n# its port\nport = 2\n'


def test_the_command_line_comes_first_then_the_environment_then_the_file(
    snugvl: Run,
    file: Path,
    pictures: Path,
    chosen: list[options.ModelChoice],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written(file, 'model = "from/file"\nmemory = "2GiB"\n[ask]\nmemory = "3GiB"\n')
    picture = pictures / "a.png"
    assert snugvl("caption", picture).code == snugvl("ask", picture, "What?").code == 0
    monkeypatch.setenv("SNUGVL_MODEL", "from/environment")
    snugvl("caption", picture)
    snugvl("caption", picture, "-m", "from/line", "--memory", "1GiB")
    assert [(each.name, each.load.memory) for each in chosen] == [
        ("from/file", "2GiB"), ("from/file", "3GiB"), ("from/environment", "2GiB"), ("from/line", "1GiB"),
    ]  # fmt: skip


def test_serve_takes_its_model_and_port(served: Served, file: Path) -> None:
    written(file, 'model = "pocket"\nquiet = true\n[serve]\nport = 0\nserved-model-name = ["a", "b"]\n')
    assert run(["serve"]) == 0
    assert served.settings[0].names == ("a", "b")
    assert isinstance(served.services[0], SupervisedEngine)


def test_what_the_file_says_of_loading_is_none_of_a_servers(
    snugvl: Run,
    file: Path,
    pictures: Path,
    chosen: list[options.ModelChoice],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written(file, 'model = "from/file"\nmemory = "2GiB"\n')
    monkeypatch.setattr(session, "_first_of", lambda choice: options.ModelChoice("theirs", choice.server))
    assert snugvl("caption", pictures / "a.png", "--server", "http://127.0.0.1:9").code == 0
    assert (chosen[0].name, chosen[0].load.memory) == ("theirs", None)
    ran = snugvl("caption", pictures / "a.png", "--server", "http://127.0.0.1:9", "--memory", "2GiB")
    assert (ran.code, "--memory can't be chosen" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("colour = 3\n", "line 1: colour is not an option of any command"),
        ("\n[serve]\nspeed = 3\n", "line 3: speed is not an option of snugvl serve"),
        ("[fly]\nport = 3\n", "line 1: [fly] is not a command"),
        ('[serve]\nport = "many"\n', "line 2: port: 'many' is not a whole number"),
        ("port = 99999\n", "99999 is not between 0 and 65535"),
        ('dtype = "int3"\n', "line 1: dtype: 'int3' is not one of 'auto'"),
        ("quiet = 1\n", "line 1: quiet is 1; it must be true or false"),
        ("memory = true\n", "line 1: memory is True; it must be text or a number"),
        ("memory = [1]\n", "it must be one text or number"),
        ("memory = = 3\n", "at line 1, column 10"),
        ("help = true\n", "help is not an option"),
        ('memory = "lots"\n', "line 1: memory: --memory 'lots' is not a size"),
        ('memory = "0MiB"\n', "line 1: memory: --memory '0MiB' is nothing"),
        ('device = "gpu"\n', "line 1: device: device 'gpu' is unknown; use auto, cpu"),
        ('server = "nonsense"\n', "line 1: server: 'nonsense' is not the address of a server"),
        ('[plan]\nheld = "some"\n', "line 2: held: --held 'some' is not a size"),
        ('[plan]\nvram = "8"\n', "line 2: vram: --vram '8' has no unit"),
        ('[doctor]\nram = "-1GiB"\n', "line 2: ram: --ram '-1GiB' is negative"),
        ('[bench]\nlevels = "8:1"\n', "line 2: levels: '8:1': at least one client"),
        ('[bench]\nimage = "big"\n', "line 2: image: --image 'big' is not a size"),
        ('[serve]\nattach = "nowhere"\n', "line 2: attach: 'nowhere' is not the address"),
    ],
)
def test_a_bad_file_is_refused_by_line_and_key(
    snugvl: Run, file: Path, pictures: Path, backend: FakeBackend, text: str, said: str
) -> None:
    written(file, text)
    ran = snugvl("caption", pictures / "a.png")
    assert (ran.code, ran.out, ran.err.count("\n")) == (3, "", 1)
    assert str(file) in ran.err
    assert said in ran.err
    assert "Value error" not in ran.err
    assert backend.requests == []
    assert snugvl("config", "show").out == text  # so that it can be mended
    assert snugvl("--version").code == 0


@pytest.mark.parametrize(
    "words",
    [
        ["set", "colour", "3"],
        ["set", "port", "x"],
        ["set", "memory", "lots"],
        ["set", "device", "gpu"],
        ["set", "server", "nonsense"],
        ["set", "bench.image", "big"],
        ["set", "plan.held", "some"],
        ["set", "a b", "1"],
        ["set", "..", "1"],
        ["set", "model", "a\nb"],
    ],
)
def test_what_set_refuses_leaves_the_file_as_it_was(snugvl: Run, file: Path, words: list[str]) -> None:
    written(file, 'model = "a/b"\n')
    ran = snugvl("config", *words)
    assert (ran.code, ran.err.count("\n")) == (3, 1)
    assert file.read_text() == 'model = "a/b"\n'


def test_no_text_at_all(snugvl: Run, file: Path, pictures: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_bytes(b"\xff\xfe\x00")
    assert snugvl("caption", pictures / "a.png").code == 3
    file.write_bytes(b"#" * (config.MAX_BYTES + 1))
    assert "it has more than 65,536 bytes; it should be a few" in snugvl("caption", pictures / "a.png").err
    file.unlink()
    file.symlink_to("/dev/zero")
    assert "it has more than 65,536 bytes; it should be a few" in snugvl("caption", pictures / "a.png").err


def test_a_key_of_many_parts_is_not_even_parsed(snugvl: Run, file: Path) -> None:
    """TOML's parser would take some 20 s for these."""
    written(file, "port = 1\n" + ".".join("a" * 30_000) + " = 1\n")
    ran = snugvl("config", "show")
    assert ran == Ran(3, "", f"snugvl: {file}, line 2: it has 60,003 characters, at most 2,048 are read\n")


def test_a_mark_of_windows_before_the_first_key_is_no_mistake(snugvl: Run, file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_bytes(b"\xef\xbb\xbfport = 9000\r\n")
    assert snugvl("config", "get", "port") == Ran(0, "9000\n", "")


@pytest.mark.parametrize("text", ["[[serve]]\nport = 1\n", "serve = 5\n"])
def test_a_command_has_one_table(snugvl: Run, file: Path, pictures: Path, text: str) -> None:
    written(file, text)
    assert "serve.port is not set" in snugvl("config", "get", "serve.port").err
    ran = snugvl("caption", pictures / "a.png")
    assert ran.code == 3
    assert "serve is a command; write its options below a line [serve]" in ran.err


def test_a_number_of_thousands_of_digits_is_refused(snugvl: Run, file: Path, pictures: Path) -> None:
    written(file, f"port = 0x{'f' * 4000}\n")
    ran = snugvl("caption", pictures / "a.png")
    assert (ran.code, "unexpected" in ran.err) == (3, False)


def test_what_is_typed_is_refused_without_a_line_of_the_file(snugvl: Run, file: Path) -> None:
    for words, said in (
        (("portt", "3"), "portt is not an option of any command (did you mean port?)"),
        (("serve.port", "x"), "port: 'x' is not a whole number"),
    ):
        assert snugvl("config", "set", *words) == Ran(3, "", f"snugvl: {said}\n")
        assert not file.exists()


def test_what_only_a_run_finds_wrong_names_the_file(
    snugvl: Run, file: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of the right kind, which are wrong all the same: no model, no GPU, no such server."""
    for text, words, said in (
        ('model = "no/model"\n', ("serve",), f"; model is set in {file} (snugvl config unset model)\n"),
        ('[plan]\ngpu = "rtx-9999"\n', ("plan",), f"; gpu is set in {file} (snugvl config unset plan.gpu)"),
        ('server = "127.0.0.1:9"\n', ("caption", pictures / "a.png"), f"; server is set in {file}"),
        ("quiet = true\n", ("serve", "no/model"), ""),
    ):
        written(file, text)
        ran = snugvl(*words)
        assert ran.code, ran
        assert said in ran.err
        assert ("is set in" in ran.err) == bool(said)
    written(file, 'model = "no/model"\n')
    assert "is set in" not in snugvl("serve", "other/model").err
    assert "is set in" not in snugvl("caption", pictures / "none.png").err


def test_bare_config_says_what_it_can_and_one_word_says_key_and_value(snugvl: Run, file: Path) -> None:
    ran = snugvl("config")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == snugvl("config", "--help").out
    assert snugvl("config", "set", "model=a/b") == Ran(0, "", f'snugvl: model = "a/b" is set in {file}\n')
    assert file.read_text() == 'model = "a/b"\n'
    ran = snugvl("config", "set", "model")
    assert (ran.code, "the value is missing: snugvl config set model VALUE" in ran.err) == (2, True)


def test_a_value_that_is_refused_is_not_blamed_on_the_one_before_it(snugvl: Run, file: Path) -> None:
    written(file, 'memory = "7200MiB"\n')
    for line in (("set", "memory", "nonsense"), ("set", "memory", "7200")):
        ran = snugvl("config", *line)
        assert ran.code == 3
        assert "is set in" not in ran.err
    written(file, "memory = 5\n")
    assert snugvl("list").err.count(str(file)) == 1


def test_a_folder_of_settings_that_can_not_be_is_none(snugvl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/dev/null")
    assert snugvl("list").code == 0
    assert "doesn't exist yet" in snugvl("config", "show").err


@pytest.mark.parametrize(
    "text", [f"a = {'[' * 100_000}{']' * 100_000}", f"{'x.' * 2_000}z = 1"], ids=["[", "."]
)
def test_a_file_that_is_nested_too_deeply_says_so(snugvl: Run, file: Path, text: str) -> None:
    written(file, text)
    ran = snugvl("plan", "pocket", "--gpu", "rtx-3060")
    assert ran.code == 3
    assert str(file) in ran.err
    assert "unexpected" not in ran.err
