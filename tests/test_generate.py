"""`swa-jax generate`: the model's own texts, figures, one clear line where something is wrong."""

import io
import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from served_models import DenseGreedy
from tiny_checkpoint import save_tiny

from swa_jax import cli, generate
from swa_jax.commands import generate_run
from swa_jax.commands.generated_report import as_text
from swa_jax.loaded_model import load_model
from swa_jax.serving import Stats

PROMPTS = ["hello there, you and I", "hello there, you and me", "a € for 你 😀"]
COUNT = 12
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    path.mkdir()
    save_tiny(path)
    return path


@pytest.fixture(scope="module")
def expected(folder):
    """Tokens and text of each prompt, by a dense pass over the whole text for each token."""
    model = load_model(folder, "float32")
    greedy = DenseGreedy(model.config, model.params)
    tokens = [greedy(model.tokenizer.encode(prompt), COUNT) for prompt in PROMPTS]
    eos = model.config.eos_token_ids
    shown = [said[:-1] if said[-1] in eos else said for said in tokens]
    return list(zip(tokens, map(model.tokenizer.decode, shown), strict=True))


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def command(folder, *options, prompts=PROMPTS):
    given = [part for prompt in prompts for part in ("--prompt", prompt)]
    sizes = ["--max-new-tokens", str(COUNT), "--page-size", "4", "--max-running", "2"]
    return ["generate", "--checkpoint", str(folder), *given, *sizes, *options]


def as_json(capsys, arguments):
    assert cli.main(arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_texts_are_the_models_own(folder, expected, capsys):
    assert cli.main(command(folder, "--no-progress")) == 0
    captured = capsys.readouterr()
    for place, (tokens, text) in enumerate(expected, 1):
        assert f"--- {place} ({len(tokens)} tokens, " in captured.out
        assert text in captured.out
    count = sum(len(tokens) for tokens, _ in expected)
    assert f"swa-jax: {count} tokens at " in captured.err
    assert " prompt tokens from the cache, 0 retractions" in captured.err
    assert captured.err.count("\n") == 1


def test_json_has_everything(folder, expected, capsys):
    report = as_json(capsys, command(folder, "--json", "-", "--quiet"))
    assert [text["text"] for text in report["texts"]] == [text for _, text in expected]
    assert [text["tokens"] for text in report["texts"]] == [tokens for tokens, _ in expected]
    assert [text["prompt"] for text in report["texts"]] == PROMPTS
    assert report["model"] == "tiny"
    assert report["tokens_per_second"] > 0
    assert report["generated_tokens"] == sum(len(tokens) for tokens, _ in expected)
    # The first two prompts have nineteen tokens in common.
    assert report["cached_tokens"] == report["texts"][1]["cached_tokens"] >= 0
    assert cli.main(command(folder, "--json", "a.json", "--quiet")) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "--- 1 (" in captured.out
    assert json.loads(Path("a.json").read_text())["texts"] == report["texts"]


def test_drawn_texts_follow_from_the_seed(folder, expected, capsys):
    drawn = ["--temperature", "1", "--top-k", "50", "--top-p", "0.95", "--json", "-"]
    first, again, other, shifted = (
        as_json(capsys, command(folder, *drawn, "--seed", seed, prompts=prompts))["texts"]
        for seed, prompts in (
            ("7", PROMPTS),
            ("7", PROMPTS),
            ("8", PROMPTS),
            ("6", [PROMPTS[1], PROMPTS[0], PROMPTS[2]]),
        )
    )
    assert first == again
    texts = [text["text"] for text in first]
    assert texts != [text["text"] for text in other]
    assert texts != [text for _, text in expected]
    # Seed 6 + 1 belongs to the second prompt: the neighbours make no difference.
    assert shifted[1]["tokens"] == first[0]["tokens"]


def test_drafts_change_nothing_and_small_pools_neither(folder, expected, capsys):
    sizes = [
        "--full-tokens",
        "64",
        "--swa-tokens",
        "32",
        "--no-prefix-cache",
        "--chunk-tokens",
        "8",
    ]
    report = as_json(capsys, command(folder, "--draft", "ngram", *sizes, "--json", "-"))
    assert [text["tokens"] for text in report["texts"]] == [tokens for tokens, _ in expected]
    assert report["draft_tokens"] > 0
    assert report["cached_tokens"] == 0


def test_the_prompt_from_stdin(folder, capsys, monkeypatch):
    seen = []

    def encode_prompts(model, prompts):
        seen.extend(prompts)
        raise ValueError("enough")

    monkeypatch.setattr(generate_run, "encode_prompts", encode_prompts)
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n\n"))
    assert refused(capsys, *command(folder, prompts=[])) == "swa-jax: enough\n"
    assert seen == ["two\nlines\n"]


def test_one_text_stands_alone():
    text = generate.GeneratedText(3, 0, (1, 2), "ab", "length")
    assert as_text(generate.Generated((text,), 1.0, 1.0, new_stats())) == "ab\n"


def new_stats():
    return Stats(*(jnp.int32(0) for _ in Stats.__dataclass_fields__))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-new-tokens", "0"], "'--max-new-tokens': must be a positive integer, got '0'"),
        (["--max-new-tokens", "500"], "the model takes 512 tokens, but a prompt and"),
        (["--temperature", "-1"], "'--temperature': must be from 0 to 100, got '-1'"),
        (["--temperature", "nan"], "'--temperature': must be from 0 to 100, got 'nan'"),
        (["--top-p", "0"], "'--top-p': must be from 1e-06 to 1"),
        (["--top-k", "x"], "'--top-k': must be an integer from 0"),
        (["--seed", "9" * 5000], "'--seed': must be an integer from 0"),
        (["--draft", "eagle"], "'--draft': must be one of ngram, got 'eagle'"),
        (["--hbm", "1KiB"], "--hbm 1KiB: "),
        (["--hbm", "1MiB", "--swa-tokens", "64"], "either --hbm or the tokens"),
        (["--full-tokens", "63", "--swa-tokens", "64"], "multiple of --page-size=4, got 63"),
        (["--full-tokens", "16", "--swa-tokens", "64"], "the full pool has 16: shorten either"),
        (["--json", "no/such.json"], "--json no/such.json: cannot be written"),
        (["--checkpoint", "nowhere"], "nowhere: there is no such directory"),
        (["--checkpoint", "."], "a checkpoint needs tokenizer.json; there is none in ."),
    ],
)
def test_bad_input_is_told_in_one_line(options, said, folder, capsys):
    assert said in refused(capsys, *command(folder, *options))


def refused(capsys, *arguments):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("swa-jax: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_no_prompt(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert "give --prompt TEXT, or the text on stdin" in refused(
        capsys, *command(folder, prompts=[])
    )


def test_checkpoints_that_cannot_be_read(folder, tmp_path, capsys):
    for file in ("tokenizer.json", "config.json", "model.safetensors"):
        Path(file).write_bytes((folder / file).read_bytes())
    Path("model.safetensors").write_bytes(b"no tensors")
    assert "model.safetensors is no safetensors file: " in refused(capsys, *command("."))
    Path("model.safetensors").unlink()
    assert "model.safetensors" in refused(capsys, *command("."))
    Path("config.json").write_text("{}")
    refused(capsys, *command("."))
    Path("tokenizer.json").write_text("{}")
    assert "is no tokenizer" in refused(capsys, *command("."))


def test_a_tokenizer_of_another_model(folder, tmp_path, capsys):
    save_tiny(tmp_path, vocab_size=20)
    assert "the tokenizer.json is of another model" in refused(capsys, *command("."))


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("generate", "tokenizers"),
        ("generate", "safetensors"),
        ("serve-http", "starlette"),
        ("serve-http", "uvicorn"),
    ],
)
def test_without_the_extra(name, package, folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    said = refused(capsys, name, "--checkpoint", str(folder))
    assert said == f'swa-jax: {name} needs {package}: pip install "swa-jax[serve]"\n'


def test_help_does_not_load_what_the_commands_need():
    heavy = ("tokenizers", "safetensors", "starlette", "uvicorn", "swa_jax.serving")
    code = (
        "import sys; from swa_jax.cli import main; main(['generate', '--help']); "
        f"sys.exit(sum(name in sys.modules for name in {heavy}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"--checkpoint" in done.stdout
