"""A model, a layout and a way to run it, to be compared with one device: every factor, by name.

    Case("deepseek", sites="2 stages", schedule="zbv", tensor="sequence", branches="branches")

is DeepSeek's architecture in small, in a pipeline through two sites. Not all combinations exist;
`Case.missing` says why one does not. `covering` and `draw` choose among those that do.
"""

import dataclasses
import functools
import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from support.covering import ALONE, cheapest_pairwise, drawn_around, pairwise
from support.plans import step_plan_on

from geojax import make_mesh
from geojax.collectives import INT8
from geojax.errors import UserError
from geojax.models import ModelConfig
from geojax.models.parallel.limits import check_parallelism
from geojax.models.parallel.parallelism import Parallelism
from geojax.pipeline import SCHEDULES, Costs, Hop, Placement, Schedule, tick_table
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.pipeline.orders import ORDERS, EventRequest
from geojax.precision import RECIPES, Policy, policy
from geojax.step.plan import StepPlan
from geojax.step.stage_layers import StagedLayers

DEVICES, ROWS, SEQUENCE = 8, 24, 16
LAYERS = 12
"""Stacked layers of every model, so that many layouts are compared with one result."""

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt3": {
        "norm": "layernorm",
        "hidden_act": "gelu_pytorch_tanh",
        "position_embedding_type": "learned_absolute",
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "dropout": 0.1,
    },
    "gemma": {
        "norm": "rmsnorm1p",
        "sandwich_norm": True,
        "hidden_act": "gelu_pytorch_tanh",
        "gated": True,
        "scale_embeddings": True,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 6,
        "rope_local_base_freq": 100.0,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 2.0,
        "z_loss_coef": 0.1,
        "sliding_window": 5,
        "layer_types": ("sliding_attention", "full_attention"),
    },
    "gpt-oss": {
        "use_attention_sinks": True,
        "use_qk_norm": True,
        "qkv_bias": True,
        "attention_output_bias": True,
        "swiglu_limit": 0.1,  # many gates are beyond it
        "sliding_window": 5,
        "layer_types": ("sliding_attention", "full_attention"),
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_bias": True,
    },
    "capacity": {
        "norm": "layernorm1p",
        "hidden_act": "relu2",
        "rope_parameters": {"partial_rotary_factor": 0.5},
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "capacity_factor": 1.0,
    },
    "deepseek": {
        "q_lora_rank": 10,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "rope_interleave": True,
        "first_k_dense_replace": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "use_router_bias": True,
        "num_nextn_predict_layers": 1,
        "mtp_loss_scaling_factor": 0.3,
    },
}
"""Every mechanism of a model is in one of these; "capacity" is Nemotron's with experts that drop
tokens, and gpt-oss has normed queries and keys."""

_SIZES = {
    # The vocabulary divides over no number of ranks.
    "hidden_size": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 40,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
_BLOCKS = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 128}
"""Sizes whose parts on two ranks are whole blocks of 32 numbers, for FP8."""

FP8_GROUPS = 12
"""Pieces of a batch that have scales of their own under an FP8 recipe: one rank's microbatches."""

_LORA = {"rank": 4, "alpha": 6.0}
_RECIPES = {"fp8-current": "current", "fp8-mxfp8": "mxfp8"}

FACTORS: dict[str, tuple[Any, ...]] = {
    "family": tuple(FAMILIES),
    "schedule": ("", *sorted(SCHEDULES, key=lambda name: SCHEDULES[name].split_backward)),
    "sites": ("1 site", "2 replicas", "3 replicas", "2 stages", "3 stages"),
    "join": ("one program", "islands"),
    "zero": ("1", "0", "2", "3", "3 kept", "1 across sites"),
    "precision": ("float64", "fp8-current", "fp8-mxfp8", "int8"),
    "tensor": ("", "tensor", "sequence", "chunks"),
    "context": ("", "ring", "all_gather", "ulysses"),
    "rows": ("", "data", "expert"),
    "remat": ("none", "selective", "full"),
    "overlap": ("", "overlap", "beside ticks"),
    "gathers": ("", "late"),
    "branches": ("", "branches", "joint"),
    "head": ("", "positions", "vocabulary"),
    "hop_ticks": (1, 2, 3),
    "layers": ("", "uneven", "single"),
    "accumulation": ("", "accumulation"),
    "bucket_bytes": (None, 65536),
    "trained": ("all", "adapters"),
    "loops": ("", "unrolled"),
}
"""The values of each field of `Case`; the first is the simplest."""

COVERING = Path(__file__).with_name("covering.jsonl")

_KINDS: dict[str, Callable[[Any], Any]] = {
    "family": lambda family: family,
    "schedule": lambda name: name and ("split" if SCHEDULES[name].split_backward else "whole"),
    "sites": lambda sites: sites if sites == "1 site" else sites[2:],
    "join": lambda join: join,
    "zero": lambda zero: {"0": "1", "3 kept": "3"}.get(zero, zero),
    "precision": lambda precision: precision[:3],
    "tensor": lambda tensor: tensor.replace("chunks", "sequence"),
    "context": bool,
    "rows": lambda rows: rows,
}
"""The factors whose values meet one another, and what counts as one value where it is so."""


def kind_of(name: str, value: Any) -> Any:
    """Return the kind of a factor's value: cases of the covering array hold each pair of kinds."""
    return _KINDS[name](value) if name in _KINDS else ALONE


def value_of(name: str, value: Any) -> Any:
    """Return a factor's value itself, where `kind_of` pairs it with others."""
    return value if name in _KINDS else ALONE


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a layout; `str` is its name."""

    family: str = "gpt3"
    schedule: str = ""
    """Of a pipeline; "": there is none."""
    sites: str = "1 site"
    """Sites that share the batch ("replicas"), a pipeline inside each, or one through "stages"."""
    join: str = "one program"
    """"one program" over all sites, or "islands", a runtime for each."""
    zero: str = "1"
    precision: str = "float64"
    """"fp8-...": the products of linear layers, the rest in float64; "int8": gradients between
    sites, with error feedback; "fp32": all, which is compared as `support.distances` says."""
    tensor: str = ""
    context: str = ""
    rows: str = ""
    """The axis that shares the rows of a microbatch inside a site."""
    remat: str = "none"
    overlap: str = ""
    """"overlap": gradients are reduced while other layers or chunks go backwards; "beside ticks":
    those of a pipeline's chunk in the site too, while the chunk behind it crosses."""
    gathers: str = ""
    """"late": the weights of a stage's chunks come beside the ticks of the chunks before."""
    branches: str = ""
    """"branches": idle stages of a pipeline in one program do nothing; "joint": and a stage's
    forward and backward of one tick are one branch."""
    head: str = ""
    """"positions": stages of the last one's site share the head of every microbatch. "vocabulary":
    stages of one site share embedding and head."""
    hop_ticks: int = 1
    """At the cut between sites (of two cuts the other one takes four less this); with a pipeline in
    each site between its stages."""
    layers: str = ""
    """"uneven": chunks of a pipeline have unequal numbers of layers; "single": each has one."""
    accumulation: str = ""
    """"accumulation": several microbatches without a pipeline."""
    bucket_bytes: int | None = None
    trained: str = "all"
    """"adapters": low-rank adapters, all else frozen."""
    loops: str = ""
    """"unrolled": the program holds each layer by itself."""

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in FACTORS}
        said = [
            f"{name.replace('_', ' ')} {value}" if isinstance(value, int) else str(value)
            for name, value in values.items()
            if value != FACTORS[name][0] or name == "family"
        ]
        renamed = {"1": "zero 1"} | {zero: f"zero {zero}" for zero in FACTORS["zero"]}
        return "-".join(renamed.get(word, word).replace(" ", "_") for word in said)

    # What there is of it

    @functools.cached_property
    def missing(self) -> str | None:
        """Why there is no such case; None if there is."""
        reason = self._without_pipeline() if not self.schedule else self._of_pipeline()
        reason = reason or (self._of_islands() if self.join == "islands" else None)
        reason = reason or self._of_model()
        if reason:
            return reason
        if self.axes is None:
            return f"more than {DEVICES} devices"
        if math.prod(self.axes.values()) == 1:
            return "one device is what all are compared with"
        if self.zero == "1 across sites" and (self.dc == 1 or self.through_sites):
            return "state is shared across replicas"
        if self.loops and self.schedule and self.join != "islands":
            return "layers of stages are in loops"
        if self.loops and (self.overlap or self.zero[0] in "23"):
            return "what is sent beside layers is in loops over them"
        if self.head and (self.axes["stage"] == 1 or self.model.num_nextn_predict_layers):
            return "one stage, or modules for later tokens"
        if self.head == "vocabulary" and self.through_sites:
            return "the vocabulary is shared inside a site"
        comes_round = sum(self.hops[: self.axes["stage"]]) if self.schedule else 0
        is_interleaved = self.schedule == "interleaved" and not self.through_sites
        if is_interleaved and comes_round > self.microbatches:
            return "too few microbatches until one comes round to its stage's next chunk"
        if self.overlap and self.through_sites:
            return "stages that are sites reduce nothing between them"
        try:
            check_parallelism(self.model, self._parallelism, SEQUENCE)
        except UserError as error:
            return str(error)
        return None

    def _without_pipeline(self) -> str | None:
        if self.through_sites:
            return "sites that are stages have a schedule"
        if self.branches or self.layers or self.head or self.hop_ticks > 1:
            return "of pipelines"
        if self.overlap == "beside ticks" or self.gathers:
            return "of pipelines"
        if self.zero == "3 kept" and self.join == "islands":
            return "islands reshard weights after each pass"
        return None

    def _of_pipeline(self) -> str | None:
        split = SCHEDULES[self.schedule].split_backward
        if self.sites in ("1 site", "3 replicas"):
            return "a pipeline inside two sites shows what one inside any number does"
        if self.zero not in ("0", "1", "1 across sites"):
            return "a pipeline would send a microbatch's gradients in every tick"
        if self.accumulation:
            return "a pipeline has microbatches"
        if self.join == "one program":
            if split and self.branches != "branches":
                return "split backwards take branches, one for each action"
            if self.gathers and not (self.schedule in ("interleaved", "zbv") and self.branches):
                return "chunks come late where a stage has several, and branches"
            if self.gathers and self.zero == "0":
                return "every rank has whole weights"
            if self.branches and self.schedule == "branch_free":
                return "with branches it is geopipe"
            interleaved = self.schedule == "interleaved"
            if self.layers == "single" and not (interleaved and self.branches == "joint"):
                return "joint ticks hold the weights of a layer"
            if self.context == "ring" and (self.branches or self.layers):
                return "a ring's messages on CPUs wait for all devices: those that work and others"
        return None

    def _of_islands(self) -> str | None:
        if self.dc == 1:
            return "one site is no island"
        if self.schedule and not self.through_sites:
            return "islands that are replicas have no stages"
        if self.schedule and ORDERS[self.schedule].by_events is None:
            return "it is an order of ticks"
        if self.branches or self.head or self.hop_ticks > 1:
            return "of one program"
        if self.overlap or self.gathers or self.zero == "1 across sites":
            return "of one program"
        if self.layers:
            return "islands have even chunks here"
        if self.trained == "adapters":
            return "islands train no adapters"
        return None

    def _of_model(self) -> str | None:
        if self.trained == "adapters" and "kv_lora_rank" in FAMILIES[self.family]:
            return "adapters are of attention without latents"
        experts = "num_experts" in FAMILIES[self.family]
        if self.precision == "int8":
            if self.dc == 1 or self.through_sites or self.zero == "1 across sites":
                return "nothing is summed between sites, or only shards"
            if self.join == "islands":
                return "tests of islands compare it"
        if self.precision in _RECIPES and self.trained == "adapters":
            return "adapters train in no FP8"
        if self.precision == "fp8-mxfp8" and (experts or self.context):
            return "in another order of the tokens the kernels' gradients have other blocks"
        if self.precision == "fp8-mxfp8" and self.tensor == "chunks":
            return "in another order of the tokens the kernels' gradients have other blocks"
        if self.precision in _RECIPES and self.layers == "uneven":
            return "chunks of any length round alike"
        if self.precision in _RECIPES and experts and self.rows == "expert":
            return "all rows of an expert have one scale, from whichever ranks they come"
        if self.precision in _RECIPES and experts and self.context:
            return "an expert's rows have a scale on each rank of context"
        return None

    # Where it lies

    @property
    def dc(self) -> int:
        """The number of sites."""
        return int(self.sites[0])

    @property
    def through_sites(self) -> bool:
        return "stages" in self.sites

    @functools.cached_property
    def axes(self) -> dict[str, int] | None:
        """The mesh, with as many ranks as there are devices for; None: there are too few."""
        inside = {
            "data": 2 if self.rows == "data" else 1,
            "expert": 2 if self.rows == "expert" else 1,
            "context": 2 if self.context else 1,
            "tensor": 2 if self.tensor else 1,
        }
        stages = (1, 2)[:: -1 if self.through_sites else 1] if self.schedule else (1,)
        if self.schedule and not self.through_sites:
            stages = (2,)
        for stage in stages:
            axes = {"dc": self.dc, "stage": stage} | inside
            if math.prod(axes.values()) <= DEVICES:
                break
        else:
            return None
        # Devices that are left go to whatever shares something.
        for axis in ("tensor", "context", "data", "expert"):
            blocks = self.precision in _RECIPES
            if axes[axis] == 2 and 2 * math.prod(axes.values()) <= DEVICES and not blocks:
                axes[axis] = 4
        return axes

    @property
    def ranks_of_rows(self) -> int:
        """Ranks among which a batch's rows are dealt out."""
        assert self.axes is not None, self.missing
        sites = 1 if self.through_sites else self.dc
        return sites * self.axes["data"] * self.axes["expert"]

    @property
    def microbatches(self) -> int:
        """Of each rank; they divide its rows."""
        rows = ROWS // self.ranks_of_rows
        if self.precision in _RECIPES:
            return FP8_GROUPS // self.ranks_of_rows
        if self.schedule:
            return next(count for count in (6, 4, 3) if rows % count == 0)
        return next(count for count in (2, 3) if rows % count == 0) if self.accumulation else 1

    @property
    def placement(self) -> Placement:
        assert self.axes is not None, self.missing
        stage = self.axes["stage"]
        stages = [stage] * self.dc if self.through_sites else [stage]
        if self.schedule == "zbv":
            return Placement.vee(sum(stages))
        chunks = LAYERS // sum(stages) if self.layers == "single" else 2
        return Placement.interleaved(stages, chunks if self.schedule == "interleaved" else 1)

    @property
    def hops(self) -> list[int]:
        """The ticks between each chunk and its successor."""
        assert self.axes is not None, self.missing
        hops, cuts = [], itertools.cycle([self.hop_ticks, 4 - self.hop_ticks])
        for before, behind in itertools.pairwise(self.placement.stage_of):
            if not self.through_sites:
                hops.append(self.hop_ticks if before != behind else 1)
            elif before // self.axes["stage"] != behind // self.axes["stage"]:
                hops.append(next(cuts))
            else:
                hops.append(1)
        return hops

    @property
    def layers_per_chunk(self) -> tuple[int, ...]:
        """Layers of each chunk of a pipeline; the first dense ones of a mixture come before."""
        chunks = self.placement.chunks
        cuts = [LAYERS * chunk // chunks for chunk in range(1, chunks)]
        if self.layers == "uneven":
            cuts = sorted(random.Random(0).sample(range(1, LAYERS), chunks - 1))
        return tuple(end - start for start, end in itertools.pairwise([0, *cuts, LAYERS]))

    # What runs

    @functools.cached_property
    def model(self) -> ModelConfig:
        parts = FAMILIES[self.family]
        sizes = _SIZES | (_BLOCKS if self.precision in _RECIPES else {})
        if "kv_lora_rank" in parts:
            del sizes["head_dim"], sizes["num_key_value_heads"]
        layers = LAYERS + parts.get("first_k_dense_replace", 0)
        model = ModelConfig(num_hidden_layers=layers, **sizes | parts)
        if self.join == "islands":
            model = model.replace(num_nextn_predict_layers=0)
        if self.trained == "adapters":
            model = model.replace(lora=_LORA, dropout=0.0)
        return model

    @property
    def policy(self) -> Policy:
        """All in float64 but for the products of an FP8 recipe: two sums of the same numbers in
        another order round to the same FP8 numbers, but for one in 10^12 or so."""
        if self.precision == "fp32":
            return policy("fp32")
        recipe = _RECIPES.get(self.precision)
        return dataclasses.replace(policy("fp64"), recipe=RECIPES[recipe] if recipe else None)

    @property
    def options(self) -> dict[str, Any]:
        """Of the `StepPlan`, but for what makes a pipeline."""
        return {
            "remat": self.remat,
            "sequence_parallel": self.tensor in ("sequence", "chunks"),
            "chunks": 2 if self.tensor == "chunks" else 1,
            "context_method": self.context or "ring",
            "zero_stage": int(self.zero[0]),
            "reshard_after_forward": self.zero != "3 kept",
            "shard_across_sites": self.zero == "1 across sites",
            "overlap_grad_reduce": bool(self.overlap),
            "overlap_scatter": self.overlap == "beside ticks",
            "overlap_param_gather": bool(self.gathers),
            "bucket_bytes": self.bucket_bytes,
            "scan_layers": not self.loops,
            "wire_format": INT8 if self.precision == "int8" else None,
        }

    @property
    def plan(self) -> StepPlan:
        """The step of one program."""
        assert self.axes is not None, self.missing
        pipeline: dict[str, Any] = {}
        if self.schedule:
            pipeline = {
                "dc_role": "stage" if self.through_sites else "data",
                "head": self.head or "auto",
                "staged_layers": StagedLayers(
                    self.placement,
                    self.layers_per_chunk,
                    self.axes["stage"] if self.head else 1,
                    self.head == "vocabulary",
                ),
                "tick_program": self.tick_program,
            }
        devices = jax.devices()[: math.prod(self.axes.values())]
        mesh = make_mesh(devices=devices, **self.axes)
        return step_plan_on(mesh, self.policy, self.microbatches, **pipeline, **self.options)

    @property
    def tick_program(self) -> TickProgram:
        limit = None
        if self.schedule.startswith("latency_hiding"):  # less than 1F1B takes
            limit = max(2, self.placement.stages - 1)
        costs = Costs.uniform(self.placement.chunks, 1.0, 1.0, 1.0)
        if self.branches == "joint":  # it is worth a tick that no microbatch turns in one
            costs = dataclasses.replace(costs, apart=1.0)
        table = tick_table(
            self.schedule, self.placement, self.microbatches, self.hops, limit, costs=costs
        )
        joint = self.branches == "joint"
        return TickProgram.of(
            table,
            branch_free=not self.branches,
            joint=joint,
            shares_head=bool(self.head),
            shares_embedding=self.head == "vocabulary",
        )

    @property
    def event_order(self) -> Schedule:
        """The order of the stages of islands."""
        assert self.axes is not None, self.missing
        by_events, stages = ORDERS[self.schedule].by_events, self.placement.stages
        assert by_events is not None, self.missing
        request = EventRequest(
            stages_per_site=(self.axes["stage"],) * self.dc,
            microbatches=self.microbatches,
            costs=Costs.uniform(stages, 1.0, 2.0, hop=Hop(1.0)),
            memory_limit=max(2, stages),
            virtual_stages=self.placement.chunks // stages,
        )
        return by_events(request)

    @property
    def _parallelism(self) -> Parallelism:
        assert self.axes is not None
        return Parallelism(
            tensor=self.axes["tensor"],
            sequence=self.tensor in ("sequence", "chunks"),
            chunks=2 if self.tensor == "chunks" else 1,
            context=self.axes["context"],
            context_method=self.context or "ring",
            expert=self.axes["expert"],
            vocabulary_stages=self.axes["stage"] if self.head == "vocabulary" else 1,
        )


MORE = (
    # Stages with several chunks, each of which leaves early.
    Case("gemma", "interleaved", "2 replicas", overlap="overlap"),
    Case("gemma", "zbv", "2 replicas", overlap="overlap", branches="branches"),
    # Chunks whose weights come late: of a mixture, in FP8, with a split backward.
    Case(
        "capacity",
        "interleaved",
        "2 replicas",
        rows="data",
        overlap="beside ticks",
        gathers="late",
        branches="branches",
    ),
    Case(
        "gpt3",
        "interleaved",
        "2 replicas",
        precision="fp8-current",
        rows="data",
        gathers="late",
        branches="joint",
        layers="single",
    ),
    Case("gemma", "zbv", "2 replicas", rows="data", gathers="late", branches="branches"),
    # Streams in parts: kept or gathered again, with dropout by position.
    Case("gpt3", tensor="chunks", rows="data", accumulation="accumulation"),
    Case("gemma", "interleaved", "2 replicas", tensor="chunks", remat="selective"),
    # Passes that share a branch, where the last stage reads what its own tick made too.
    Case("gpt3", "1f1b", "2 stages", tensor="sequence", branches="joint", hop_ticks=2),
    Case("gemma", "interleaved", "2 replicas", tensor="tensor", branches="joint"),
    # A head that stages share: in ticks that are joint otherwise, also by its vocabulary; in the
    # last of two sites, and without branches.
    *(
        Case(
            "gemma",
            "interleaved",
            "2 replicas",
            tensor="sequence",
            branches="joint",
            head=head,
            layers="single",
        )
        for head in ("positions", "vocabulary")
    ),
    # Four stages, whose products add to the sums of the chunk that they run.
    Case(
        "gemma",
        "interleaved",
        "2 stages",
        tensor="sequence",
        branches="joint",
        head="positions",
        layers="single",
    ),
    Case("gpt3", "1f1b", "2 stages", rows="data", branches="branches", head="positions"),
    Case(
        "gpt3", "branch_free", "2 replicas", rows="data", overlap="beside ticks", head="positions"
    ),
    # A vocabulary that stages share: beside parts that leave early, without branches and with state
    # that sites share, and with a split backward and errors of the link.
    Case(
        "gpt3",
        "interleaved",
        "2 replicas",
        rows="data",
        overlap="beside ticks",
        gathers="late",
        branches="joint",
        head="vocabulary",
        layers="single",
    ),
    Case("gpt3", "branch_free", "2 replicas", zero="1 across sites", head="vocabulary"),
    Case("capacity", "zbv", "2 replicas", precision="int8", branches="branches", head="vocabulary"),
    # Windows across keys that are gathered, also when a layer is computed again.
    Case("gemma", context="all_gather", remat="full"),
    # Programs of islands that hold each layer by itself.
    Case(
        "gemma",
        sites="2 replicas",
        join="islands",
        rows="data",
        remat="selective",
        accumulation="accumulation",
        loops="unrolled",
    ),
    Case("gpt3", "1f1b", "2 stages", join="islands", remat="selective", loops="unrolled"),
)
"""Cases that no pair of kinds asks for."""


def covering() -> list[Case]:
    """Return the cases of `covering.jsonl`, every value and every pair of kinds, and `MORE`."""
    drawn = [Case(**json.loads(line)) for line in COVERING.read_text().splitlines()]
    return [*drawn, *MORE]


def all_pairs() -> list[Case]:
    """Return cases that hold every pair of values of two factors that have kinds; a minute."""
    return _sorted(pairwise(FACTORS, exists, value_of))


def make_covering() -> None:
    """Write `covering.jsonl` anew; minutes."""
    cases = _sorted(cheapest_pairwise(FACTORS, exists, kind_of, seconds_of))
    COVERING.write_text("".join(json.dumps(_changed(case)) + "\n" for case in cases))


_SECONDS = {"gpt3": 4.4, "gemma": 4.1, "capacity": 6.6, "gpt-oss": 6.1, "deepseek": 12.0}
"""Of compiling a model's step in one program."""


def seconds_of(values: dict[str, Any]) -> float:
    """Estimate the processor time of a case: it goes to the compilation of its programs.

    Factors were fitted to 35 cases, to 14% of each. Those that pair with no other are left out, so
    that their dearer values are as frequent as others.
    """
    case = Case(**values)
    seconds = _SECONDS[case.family]
    if case.join == "islands":
        seconds *= 2.2
    if case.precision in _RECIPES:
        seconds *= 2.3
    if case.context:
        seconds *= 1.3
    return seconds


def _sorted(found: list[dict[str, Any]]) -> list[Case]:
    """Put those that share a result of one device side by side."""
    cases = [Case(**values) for values in found]
    return sorted(cases, key=lambda case: (case.trained, case.precision, case.family, str(case)))


def _changed(case: Case) -> dict[str, Any]:
    values = {name: getattr(case, name) for name in FACTORS}
    return {name: value for name, value in values.items() if value != FACTORS[name][0]}


def draw(seed: int, index: int) -> Case:
    """Return the `index`-th case of those that `seed` draws."""
    generator = random.Random(f"{seed}/{index}")
    while (values := drawn_around({}, FACTORS, exists, generator)) is None:
        pass
    return Case(**values)


def exists(values: dict[str, Any]) -> bool:
    """Return True if there is a case with these values."""
    return Case(**values).missing is None


if __name__ == "__main__":  # python -m equality.case, in tests/
    make_covering()
