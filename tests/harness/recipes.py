# SPDX-License-Identifier: Apache-2.0
"""The launch commands that vllm-ascend's guides publish, and what `vllm-ascend-pd migrate` makes of them.

`python tests/harness/recipes.py` writes docs/recipes.md.
"""

import json
import re
import sys
import tempfile
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from vllm_ascend_pd.tools.migrate.changes import ChangeKind, Migration
from vllm_ascend_pd.tools.migrate.command import EngineArguments, read_arguments
from vllm_ascend_pd.tools.migrate.engine import migrate_command

REPOSITORY = Path(__file__).resolve().parents[2]
DATA = REPOSITORY / "tests/unit/data/recipes"
PAGE = REPOSITORY / "docs/recipes.md"

# By the name of the served model, the first that fits: its architecture in models.json.
_ARCHITECTURES = {
    r"w8a8c8_attn": "deepseek-v3-c8",
    r"V4\.1": "deepseek-v4.1",
    r"V4": "deepseek-v4",
    r"V3\.2": "deepseek-v3.2",
    r"(?i)deepseek": "deepseek-v3",
    r"GLM-5\.3-Flash": "glm-5-next",
    r"GLM-?5": "glm-5",
    r"GLM-4": "glm-4.7",
    r"Kimi-K2": "kimi-k2",
    r"KIMI_K3": "kimi-k3",
    r"MiniMax-M3": "minimax-m3",
    r"MiniMax": "minimax-m2",
    r"Qwen3-VL": "qwen3-vl-moe",
    r"Qwen3-235B|Qwen3-30B": "qwen3-moe",
    r"Qwen3\.5-27B": "qwen3.5",
    r"Qwen3\.5-397B": "qwen3.5-moe",
    r"Qwen2\.5-VL": "qwen2.5-vl",
    r"Qwen3-0\.6B": "qwen3",
    r"": "qwen2",
}
# The scripts' arguments and variables, where the old connector's configuration does not say them.
_SET = {"KV_PORT": "30000", "mooncake_port": "20001", "ENGINE_ID": "1", "8": "1", "node_rank": "0"}
_PORTS = {"3": "dp", "4": "0", "7": "tp", "dp_size": "dp", "dp_rank": "0", "tp_size": "tp"}
# vllm-ascend's int8 caches of MLA: the key of the checkpoint's description.
_INT8 = {"deepseek-v3-c8": {"fa_quant_type": "FAKQuant", "model.layers.0.self_attn.fa_k.scale": "FLOAT"}}


STARTED = {
    "deepseek-r1": (5, 8),
    "deepseek-v3.1": (11, 13),
    "glm-4.7": (34, 36),
    "kimi-k2.5": (56, 58),
    "kimi-k2.6": (60, 62),
    "minimax-m2": (66, 67),
    "qwen3-moe": (68, 69),
    "qwen3-vl": (71, 72),
    "large-scale-ep": (80, 81),
}
"""Pairs of prefill and decode, by number, that `tests/npu/e2e/test_recipe_pairs.py` starts."""

# By architecture: why no pair of it is among these.
NOT_STARTED = {
    "deepseek-v3-c8": "the operators that read int8 caches are compiled with CANN",
    "deepseek-v3.2": "sparse attention's operators are compiled with CANN",
    "glm-5": "sparse attention's operators are compiled with CANN",
    "deepseek-v4": "the model's operators are compiled with CANN",
    "kimi-k3": "linear attention needs Triton",
    "qwen3.5": "drafts by the MTP layer need Triton; a small Qwen3.5 without them runs",
    "qwen3.5-moe": "drafts by the MTP layer need Triton; a small Qwen3.5 without them runs",
    "qwen2.5-vl": "the tests have no small vision tower of this model",
    "qwen2": "the guide's prefill engine for it uses a pool (UCM) that is not installed here",
}


@dataclass(frozen=True)
class Recipe:
    """One published command. `number`: its place in its version's file, from 1."""

    number: int
    data: dict[str, Any]

    @property
    def guide(self) -> str:
        return str(self.data["guide"])

    @property
    def connector(self) -> str:
        return ", ".join(name for name in self.migrated.was)

    @property
    def side(self) -> str:
        """What the guide counts it as. Engines that also use a pool have several roles."""
        role = self.data["role"][0]
        return {"kv_producer": "prefill", "kv_consumer": "decode"}.get(role, "both")

    @property
    def architecture(self) -> str:
        name = self.data["model"]
        return next(kind for pattern, kind in _ARCHITECTURES.items() if re.search(pattern, name))

    @property
    def model(self) -> str:
        return Path(self.data["model"].strip("/<>").replace("Eco-Tech/", "")).name

    @property
    def _old(self) -> str:
        old = self.data["kv_transfer_config"]
        return old if isinstance(old, str) else json.dumps(old)

    def arguments(self) -> EngineArguments:
        """The command as the guide's launcher starts it, with what that fills in for `$NAME`."""
        words = ["vllm", "serve", self.data["model"]]
        for name, value in self.data["args"].items():
            words.append(f"--{name}")
            if value is not True:
                words.append(json.dumps(value) if isinstance(value, dict) else self._filled(str(value)))
        words += ["--kv-transfer-config", self._filled(self._old)]
        # Only names are known. These switch something on; FlashComm needs expert parallelism.
        names = [name for name in self.data["env"] if name.startswith("VLLM_ASCEND_ENABLE_")]
        experts = self.data["args"].get("enable-expert-parallel", False)
        variables = {name: str(int(experts or not name.endswith("FLASHCOMM1"))) for name in names}
        return read_arguments(words, variables)

    def _filled(self, text: str) -> str:
        own = re.search(rf'"{self.side}": *{{([^}}]*)}}', self._old)
        sizes = {"tp": "4", "dp": "8", **dict(re.findall(r'"(dp|tp)_size": *(\d+)', own[1] if own else ""))}
        values = {**_SET, **{name: sizes.get(value, value) for name, value in _PORTS.items()}}
        return re.sub(r"\$(\w+)", lambda match: values[match[1]], text)

    @cached_property
    def migrated(self) -> Migration:
        with tempfile.TemporaryDirectory() as folder:
            make_model(self.architecture, Path(folder))
            return migrate_command(self.arguments(), folder)

    @property
    def verdict(self) -> str:
        if self.migrated.stops:
            return "refused"
        return "works with the printed change" if self.changed else "works"

    @property
    def changed(self) -> list[tuple[str, str]]:
        """What changes beside the connector's entry, and why."""
        entry = ("kv_port", "--kv-transfer-config", "connectors", *self.migrated.was)
        kept = (ChangeKind.CHANGED, ChangeKind.MEANING)
        return [(c.subject, c.why) for c in self.migrated.changes if c.kind in kept and c.subject not in entry]


FILES = {"0.23.0.post1": "recipes.json", "0.30.0rc2": "recipes-0.30.json"}
"""By vllm-ascend's version."""
OLDER, NEWER = FILES


@cache
def recipes(version: str = OLDER) -> list[Recipe]:
    read = json.loads((DATA / FILES[version]).read_text(encoding="utf-8"))
    return [Recipe(number, data) for number, data in enumerate(read, 1)]


def make_model(architecture: str, folder: Path) -> None:
    """Writes a model's configuration, without weights."""
    config = json.loads((DATA / "models.json").read_text(encoding="utf-8"))[architecture]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    described = {"model_quant_type": "W8A8", **_INT8.get(architecture, {})}
    (folder / "quant_model_description.json").write_text(json.dumps(described), encoding="utf-8")


def make_draft(architecture: str, folder: Path) -> str:
    """Writes the configuration of an EAGLE-3 head for a model in `folder`. Returns where."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    target = config.get("text_config", config)
    same = ("hidden_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "torch_dtype")
    draft = {name: target[name] for name in same}
    draft |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    draft |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 64}
    draft |= {"draft_vocab_size": target["vocab_size"], "hidden_act": "silu"}
    (folder / "draft").mkdir()
    (folder / "draft" / "config.json").write_text(json.dumps(draft), encoding="utf-8")
    return str(folder / "draft")


def page() -> str:
    subjects: dict[str, list[str]] = {}
    rows = _rows(subjects)
    notes = "".join(f"{number}. {', '.join(each)}: {why}\n" for number, (why, each) in enumerate(subjects.items(), 1))
    pairs = [recipe for recipe in recipes() if recipe.side != "both"]
    started = f"{_STARTED_HEAD}{_not_started(pairs)}"
    counts = "".join(map(_counts, FILES))
    return f"{_HEAD}\n{counts}\n{rows}\n## Changes and reasons\n\n{notes}\n## Started\n\n{started}"


def _counts(version: str) -> str:
    every = recipes(version)
    pairs = [recipe for recipe in every if recipe.side != "both"]
    counts = {verdict: sum(r.verdict == verdict for r in pairs) for verdict in _VERDICTS}
    counted = ", ".join(f"{verdict}: {count}" for verdict, count in counts.items())
    return (
        f"- {version}: {len(every)} commands. Of {len(pairs)} prefill and decode engines: {counted}. "
        f"The other {len(every) - len(pairs)} commands use pools or offloading.\n"
    )


def _not_started(pairs: list[Recipe]) -> str:
    works = [recipe for recipe in pairs if not recipe.migrated.stops]
    lines = []
    for why in dict.fromkeys(NOT_STARTED.values()):
        numbers = [recipe.number for recipe in works if NOT_STARTED.get(recipe.architecture) == why]
        lines.append(f"- {_numbers(numbers)}: {why}.\n")
    return "".join(lines)


_USUAL = "MooncakeConnectorV1"
_VERDICTS = ("works", "works with the printed change", "refused")
_HEAD = """\
# The guides' recipes

This page says what [`vllm-ascend-pd migrate`](migrating.md) makes of the launch commands in vllm-ascend's guides that
have a KV role. `tests/harness/recipes.py` makes the page, and a [test](../tests/unit/test_recipes.py) checks it.
[Another](../tests/npu/test_recipes.py) gives the new commands to vLLM's and vllm-ascend's own configuration checks on
emulated CANN, with a small model of each architecture. It leaves out caches of fp8, which need another chip, and
commands that vllm-ascend refuses as the guides have them. The rows of DeepSeek V4 rest on a
[test](../tests/npu/test_compressed.py) that compares its caches byte by byte, MTP's among them.

The table names commands by their place in `tests/unit/data/recipes/recipes.json` and `recipes-0.30.json`. Without a
number in brackets only `--kv-transfer-config` changes. Such a number stands for another option that `migrate` changes,
or for why it refuses. Where no connector is named, the guide has MooncakeConnectorV1.
"""
_STARTED_PAIRS = ", ".join(f"{prefill} and {decode}" for prefill, decode in STARTED.values())
_STARTED_HEAD = f"""\
[A test](../tests/npu/e2e/test_recipe_pairs.py) starts pairs of vllm-ascend {OLDER} with what `migrate` makes of them:
{_STARTED_PAIRS}.
Each pair answers as a single engine does, with prefill's KV. The test's docstring says what the small models leave out.
Other commands of the same models were not started, and these:

"""


def _rows(subjects: dict[str, list[str]]) -> str:
    """One row for all commands of a guide with the same model and connector. Adds to `subjects`, by reason."""
    rows: dict[tuple[str, ...], dict[str, dict[str, list[int]]]] = {}
    for version in FILES:
        for recipe in recipes(version):
            said = [(c.subject, c.why) for c in recipe.migrated.stops] or recipe.changed
            for subject, why in said:
                if subject not in subjects.setdefault(why, []):
                    subjects[why].append(subject)
            words = ["refused"] if recipe.migrated.stops else []
            words += [f"[{list(subjects).index(why) + 1}]" for _, why in said]
            versions = rows.setdefault((Path(recipe.guide).stem, recipe.model, recipe.connector), {})
            versions.setdefault(version, {}).setdefault(" ".join(words), []).append(recipe.number)
    lines = [f"| guide | model | connector | {' | '.join(FILES)} |", "|---|---|---|---|---|"]
    for row, versions in rows.items():
        connector = "" if row[2] == _USUAL else row[2]
        found = (versions.get(version, {}) for version in FILES)
        cells = ("; ".join(f"{_numbers(numbers)} {said}".strip() for said, numbers in each.items()) for each in found)
        lines.append(
            f"| {' | '.join(row[:2])} |{'|'.join(f' {cell} ' if cell else ' ' for cell in (connector, *cells))}|"
        )
    return "\n".join(lines) + "\n"


def _numbers(ascending: list[int]) -> str:
    """Returns numbers as text, with each run of them as `first-last`."""
    runs: list[list[int]] = []
    for number in ascending:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
