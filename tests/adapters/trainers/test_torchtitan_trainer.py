"""torchtitan's trainer with its debug models and the override: two steps from one seed checkpoint.

On a CPU, with FSDP over two ranks of gloo (`torchtitan_cpu`).
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

pytest.importorskip("torchtitan")
pytest.importorskip("torchtitan.train", reason="torchtitan's trainer needs a newer torch")

SCRIPT = Path(__file__).with_name("torchtitan_cpu.py")
ROOT = SCRIPT.parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the tokenizer and the text that debug configs name."""
    made = tmp_path_factory.mktemp("torchtitan")
    assets = made / "tests" / "assets"
    (assets / "tokenizer").mkdir(parents=True)
    (assets / "c4_test").mkdir()
    alphabet = [*sorted(ByteLevel.alphabet()), "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.save(str(assets / "tokenizer" / "tokenizer.json"))
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    (assets / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(ends))
    lines = [json.dumps({"text": f"After {i} comes {i + 1}. " * 9}) for i in range(64)]
    (assets / "c4_test" / "data.jsonl").write_text("\n".join(lines))
    return made


def train(folder: Path, model: str, config: str, *arguments: str, ranks: int = 1) -> str:
    """Log of two steps."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={ranks}", str(SCRIPT), "--module", model, "--config", config),
            *("--training.steps=2", "--training.seq_len=32", "--training.local_batch_size=2"),
            *("--debug.seed=1", "--checkpoint.enable", f"--checkpoint.folder=seed_{model}"),
            *("--checkpoint.interval=9", *arguments),
        ],
        cwd=folder,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "TORCHDYNAMO_DISABLE": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)


def losses(log: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step: +\d+ +loss: +([0-9.]+)", log)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "config", "override", "ranks"),
    [
        ("deepseek_v3", "deepseek_v3_debugmodel", "experts", 2),
        ("gpt_oss", "gpt_oss_debugmodel_flex", "routed_experts", 1),
    ],
)
def test_two_steps_have_the_losses_of_its_own_experts(
    model: str, config: str, override: str, ranks: int, folder: Path
) -> None:
    train(folder, model, config, "--checkpoint.create_seed_checkpoint")
    keep = ["--checkpoint.load_step=0", "--checkpoint.last_save_model_only"]
    stock = train(folder, model, config, *keep, ranks=ranks)
    name = f"phalanx.adapters.torchtitan.{override}"
    ours = train(folder, model, config, *keep, "--override.imports", name, ranks=ranks)
    assert f"[Override] {name}" in ours and "[Override]" not in stock
    assert len(losses(ours)) == 2 * ranks
    assert losses(ours) == pytest.approx(losses(stock), abs=0.01)
