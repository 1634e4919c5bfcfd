"""The presets of models in small: every setting but the sizes is theirs.

    python tests/support/shrunk_presets.py record before.json
    python tests/support/shrunk_presets.py compare before.json

writes down the initial values of each, bit by bit, and proves that they are the same afterwards.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import jax
import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[each]) for each in (2, 1)]

from support.small_models import drawn_parameters

from geojax.models import ModelConfig
from geojax.named_arrays import leaves_by_name

PRESETS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs/model").glob("*.yaml"))
_SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 10,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "query_pre_attn_scalar": 6,
    "sliding_window": 5,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "vocab_size": 301,
    "max_position_embeddings": 64,
}


def shrunk(preset: str) -> ModelConfig:
    """Return a preset with a few thousand parameters and a pattern of layers of at most two."""
    given = ModelConfig.load(preset).model_dump(exclude_unset=True)
    made = given | {name: size for name, size in _SIZES.items() if given.get(name)}
    if "num_key_value_heads" in given:
        grouped = given["num_key_value_heads"] < given["num_attention_heads"]
        made["num_key_value_heads"] = 2 if grouped else 4
    if given.get("n_group", 1) > 1:
        made |= {"n_group": 2, "topk_group": 1}
    if "layer_types" in given:
        made["layer_types"] = sorted(set(given["layer_types"]), reverse=True)
    return ModelConfig.model_validate(made)


def digest(tree: object) -> str:
    """Return a digest of the names and bytes of all leaves of a tree."""
    total = hashlib.sha256()
    for name, leaf in sorted(leaves_by_name(jax.device_get(tree)).items()):
        total.update(name.encode() + np.asarray(leaf).tobytes())
    return total.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    made = {preset: digest(drawn_parameters(shrunk(preset))) for preset in PRESETS}
    if arguments.verb == "record":
        arguments.file.write_text(json.dumps(made, indent=1) + "\n")
        return 0
    before = json.loads(arguments.file.read_text())
    changed = [preset for preset in PRESETS if made[preset] != before[preset]]
    print(f"changed: {', '.join(changed)}" if changed else f"all {len(made)} are identical")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
