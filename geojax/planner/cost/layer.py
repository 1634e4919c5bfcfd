"""Time of one layer, of the embedding and of the head, for one microbatch on one device.

Shapes: T tokens of a device, d hidden, H and K query and kv heads of D dims, F ffn, V vocabulary,
t ranks of `tensor`, c of `context`. A forward runs the products of a layer once; its backward twice
as many, half of them for the gradients of the weights, and again what the remat policy drops
(Korthikanti et al. 2022). Of a model with adapters, their products alone have gradients of weights.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

import jax

from geojax.models import AnyModel, ModelConfig, OwnModel
from geojax.models.parameters import declarations
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.execution import (
    DEFAULT_ATTENTION_BACKWARD,
    DEFAULT_ATTENTION_FORWARD,
    Execution,
)
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.matmul import MatmulRate, matmul_rate
from geojax.planner.cost.own_layer import layer_of_rank
from geojax.planner.cost.prediction import CostItem
from geojax.precision import policy
from geojax.runtime.platform import Platform, platform_of_accelerator
from geojax.step.stage_layers import adds_in_products, has_joint_ticks, holds_chunks
from geojax.topology import Site


@dataclasses.dataclass(frozen=True)
class Piece(CostItem):
    """The part of it that belongs to one microbatch."""

    forward: float = 0.0
    """Seconds that it adds to the forward."""
    backward: float = 0.0
    """Seconds that it adds to the gradient of the input, with what is computed again."""
    weight: float = 0.0
    """Seconds that it adds to the gradient of the weights."""
    hidden: float = 0.0
    """Seconds that it takes beside other work."""

    @property
    def exposed(self) -> float:
        """Seconds that it adds to a microbatch."""
        return self.forward + self.backward + self.weight

    def times(self, count: float) -> "Piece":
        """Return the same work of `count` layers."""
        return dataclasses.replace(
            self,
            forward=count * self.forward,
            backward=count * self.backward,
            weight=count * self.weight,
            hidden=count * self.hidden,
            bytes=count * self.bytes,
            messages=count * self.messages,
        )


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product of a layer's forward, [rows, inner] x [inner, columns]."""

    part: str
    rows: float
    columns: float
    inner: float
    count: float = 1
    inputs: float = 1
    """First factors that no other product has."""


REGIONS = ("qkv", "out", "up", "down")
"""The products of a dense layer by which its stream enters and leaves the ranks of `tensor`."""


@dataclasses.dataclass(frozen=True)
class LayerTimes:
    """The work of a device on one microbatch of a layout, in one site."""

    model: AnyModel
    layout: LayoutCandidate
    site: Site
    calibration: Calibration
    execution: Execution

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on a device."""
        return (
            self.layout.microbatch_size
            * self.layout.batch.sequence_length
            / self.layout.mesh.context
        )

    @property
    def own_tokens(self) -> float:
        """Tokens on which a device works between the products of a layer."""
        return self.tokens / (self.layout.mesh.tensor if self.layout.parallelism.sequence else 1)

    @property
    def itemsize(self) -> int:
        """Bytes of an activation."""
        return policy(self.layout.precision).compute_dtype.itemsize

    @property
    def bytes_per_second(self) -> float:
        """Rate of the memory in elementwise operations."""
        rate = self.site.accelerator.memory_bytes_per_second
        return (
            float("inf") if rate is None else rate * self.calibration.memory(self.site.accelerator)
        )

    @property
    def compute_dtype(self) -> str:
        """Dtype of the factors of all products but the linear layers' in FP8."""
        return policy(self.layout.precision).compute_dtype.name

    def rate(self, *, linear: bool) -> MatmulRate:
        """Return the rate of the products of linear layers, or of the head."""
        quantized = linear and policy(self.layout.precision).recipe is not None
        precision = "float8" if quantized else self.compute_dtype
        accelerator = self.site.accelerator
        if quantized and accelerator.peak("float8") is None:
            precision = self.compute_dtype
        return matmul_rate(
            accelerator,
            precision,
            self.calibration.matmul(accelerator, precision),
            self.calibration.memory(accelerator),
        )

    @property
    def recomputes(self) -> frozenset[str]:
        """Parts of a layer that its backward computes again."""
        if self.execution.recomputes is not None:
            return self.execution.recomputes
        return {
            "none": frozenset[str](),
            "selective": frozenset({"attention", "elementwise"}),
            "full": frozenset({"all"}),
        }[self.layout.remat]

    def again(self, part: str) -> bool:
        """Return True if the backward computes this part of a layer again."""
        return part in self.recomputes or "all" in self.recomputes

    def layer(self) -> Iterator[Piece]:
        """Yield the work of one layer; its collectives are in `collectives`."""
        yield self._products()
        yield self._attention()
        yield self._elementwise()
        if policy(self.layout.precision).recipe is not None:
            yield self._casts()
        if self.frozen:
            yield self._adapters()
        if self.chunks > 1:
            yield self._copies()
        yield self._sums()

    def products(self) -> list[Product]:
        """List the products of one layer's forward on one device."""
        model, layout = self.model, self.layout
        if isinstance(model, OwnModel):
            return [
                Product("own", each.rows, each.columns, each.inner, each.times)
                for each in layer_of_rank(model, layout).products
            ]
        tokens, d, t = self.tokens, model.hidden_size, layout.mesh.tensor
        heads = model.num_attention_heads / t
        queries, values = heads * model.head_dim, heads * model.v_head_dim
        keys = max(model.num_key_value_heads / t, 1) * model.head_dim
        if model.has_latent_attention:
            latent, of_head = model.kv_lora_rank, model.qk_nope_head_dim + model.v_head_dim
            products = [
                Product("latents", self.own_tokens, model.latent_width, d),
                Product("qkv", tokens, queries, model.q_lora_rank or d),
                Product("qkv", tokens, heads * of_head, latent),
            ]
        elif self.execution.fused_projections:
            products = [Product("qkv", tokens, queries + 2 * keys, d)]
        else:
            products = [
                Product("qkv", tokens, queries, d),
                Product("qkv", tokens, keys, d, 2, inputs=0),
            ]
        products.append(Product("out", tokens, d, values))
        if not model.is_moe:
            return products + self._feed_forward(tokens, model.intermediate_size / t)
        local = model.num_experts / layout.mesh.expert
        routed = tokens * model.num_experts_per_tok / local
        experts = self._feed_forward(routed, model.moe_intermediate_size / t)
        products += [
            dataclasses.replace(each, count=each.count * local, inputs=local) for each in experts
        ]
        products.append(Product("router", tokens, model.num_experts, d))
        if model.n_shared_experts:
            shared = model.shared_expert_intermediate_size / t
            products += self._feed_forward(tokens, shared)
        return products

    @property
    def forward_flops(self) -> float:
        """FLOPs of a layer's products in a forward."""
        return 2 * sum(
            each.count * each.rows * each.columns * each.inner for each in self.products()
        )

    @property
    def backward_flops(self) -> float:
        """FLOPs of a layer's products in a backward, with those computed again."""
        return (3 if "all" in self.recomputes else 2) * self.forward_flops

    @property
    def head_flops(self) -> float:
        """FLOPs of the head's product, forwards and backwards."""
        tokens, columns = self.logits
        return 3 * 2 * tokens * columns * self.model.hidden_size

    @property
    def logits(self) -> tuple[float, float]:
        """Tokens and columns of the logits that a device computes.

        Ranks of `tensor` share the vocabulary; the head of a model of your own is whole on each,
        and computes the positions that the rank holds. Stages may share positions or vocabulary.
        """
        shares = 1 if self.layout.shares_vocabulary else self.layout.head_shares
        if isinstance(self.model, OwnModel):
            return self.own_tokens / shares, self.model.vocab_size
        ranks = self.layout.model_parallelism.vocabulary_ranks
        return self.tokens / shares, self.model.vocab_size / ranks

    def _feed_forward(self, rows: float, width: float) -> list[Product]:
        assert isinstance(self.model, ModelConfig)
        d, halves = self.model.hidden_size, 2 if self.model.gated else 1
        if self.execution.fused_projections:
            up = Product("up", rows, halves * width, d)
        else:
            up = Product("up", rows, width, d, halves)
        return [up, Product("down", rows, d, width)]

    def _products(self) -> Piece:
        rate = self.rate(linear=True)
        forward = backward = weight = 0.0
        for each in self.products():
            rows, columns, inner = each.rows, each.columns, each.inner
            once, parts = self.seconds(each), self._parts_of(each)
            forward += once
            backward += each.count * parts * rate.seconds(rows / parts, inner, columns)
            backward += once if self.again(each.part) else 0.0
            weight += self.gradient_seconds(each)
        return Piece(
            "matrix products",
            "FLOPs over the peak, the fitted efficiency and that of the shape "
            "(geojax.planner.cost.matmul)",
            forward,
            backward,
            0.0 if self.frozen else weight,
        )

    @property
    def chunks(self) -> int:
        """Parts of the stream that enter and leave the products of ranks of `tensor` in turn.

        Experts take all tokens at once, and latents are so few that they travel together.
        """
        model = self.model
        whole = isinstance(model, OwnModel) or model.is_moe or model.has_latent_attention
        return 1 if whole else self.layout.model_parallelism.chunks

    def _parts_of(self, product: Product) -> int:
        return self.chunks if product.part in REGIONS else 1

    def seconds(self, product: Product) -> float:
        """Time the products that one stands for, forwards and in all parts."""
        parts = self._parts_of(product)
        rows = product.rows / parts
        once = self.rate(linear=True).seconds(rows, product.columns, product.inner)
        return product.count * parts * once

    def gradient_seconds(self, product: Product) -> float:
        """Time the products that make the gradient of a product's weights."""
        wide = 4 if self.adds_in_products else 2
        sizes = product.inner, product.columns, product.rows
        return product.count * self.rate(linear=True).seconds(*sizes, out_itemsize=wide)

    @property
    def has_joint_ticks(self) -> bool:
        """True if a forward and a backward are one branch (`geojax.step.stage_layers`)."""
        return self.execution.gradients_last and has_joint_ticks(*self._of_chunks)

    @property
    def holds_chunks(self) -> bool:
        """True if a stage copies the chunk of one layer that it runs, one of several."""
        return self.execution.gradients_last and holds_chunks(*self._of_chunks)

    @property
    def _of_chunks(self) -> tuple[LayoutCandidate, int, Platform]:
        """The layout, the most layers of a chunk, and the platform."""
        layers, chunks = self.layout.pipeline.layers, self.layout.placement.chunks
        most = math.ceil(self.model.num_stacked_layers / chunks) if layers is None else max(layers)
        return self.layout, most, platform_of_accelerator(self.site.accelerator)

    @property
    def adds_in_products(self) -> bool:
        """True if products add to the sums, in geojax' program (`pipeline.execution`) to a copy."""
        whole = self.holds_chunks and self.chunks == 1
        own = whole and adds_in_products(
            self.model, policy(self.layout.precision), self.layout.pipeline_stages
        )
        return own or self.execution.sums_in_matmul

    @property
    def frozen(self) -> bool:
        """True where adapters alone are trained: other weights have no gradients."""
        return self.model.lora is not None

    @property
    def _adapter_shapes(self) -> list[tuple[int, int]]:
        """Rows and columns of each adapter of a layer, on all ranks of `tensor` together."""
        leaves = jax.tree.leaves(declarations(self.model)["layers"])
        return [leaf.shape[-2:] for leaf in leaves if leaf.kind == "adapter"]

    def _adapters(self) -> Piece:
        rate, t = self.rate(linear=True), self.layout.mesh.tensor
        forward = backward = weight = 0.0
        for rows, columns in self._adapter_shapes:
            once = rate.seconds(self.tokens, columns, rows) / t
            forward += once
            backward += rate.seconds(self.tokens, rows, columns) / t
            backward += once if self.again("adapters") else 0.0
            weight += rate.seconds(rows, columns, self.tokens, out_itemsize=4) / t
        return Piece(
            "adapters",
            "FLOPs over the peak, or bytes through memory (geojax.planner.cost.matmul)",
            forward,
            backward,
            weight,
        )

    def _attention(self) -> Piece:
        """Time attention: fused, by its FLOPs; otherwise products and passes over the scores.

        Fused attention skips masked blocks, half of them, and those outside of a window (the mean
        of all layers); its backward computes the scores again, five products for two (Dao 2023).
        Without fusion the scores, [B, H, S, S] / (t c), are written by their product, scaled,
        masked and exponentiated in one kernel, dropped out, and read; 13 bytes a score forwards and
        20 backwards in 16 bits (Korthikanti et al. 2022, section 4, counts the same tensors).
        """
        model, layout, name = self.model, self.layout, self.site.accelerator.name
        if isinstance(model, OwnModel):
            return Piece("attention", "it is among the matrix products of your own modules")
        heads = model.num_attention_heads / layout.mesh.tensor
        scores = (
            layout.microbatch_size
            * heads
            * self.layout.batch.sequence_length**2
            / layout.mesh.context
        )
        flops = 2 * scores * (model.head_dim + model.v_head_dim)
        again = self.again("attention")
        if not self.execution.fused_attention:
            rate = self.rate(linear=False)
            forward = flops / rate.flops_per_second + 13 * scores / self.bytes_per_second
            backward = 2 * flops / rate.flops_per_second + 20 * scores / self.bytes_per_second
        else:
            peak = self.site.accelerator.peak(self.compute_dtype)
            assert peak is not None, "the products' rate asked for it before"
            share = self.execution.attention_forward.get(name, DEFAULT_ATTENTION_FORWARD)
            share_back = self.execution.attention_backward.get(name, DEFAULT_ATTENTION_BACKWARD)
            seen = flops / 2 * self._unmasked_share()
            forward = seen / (peak * share)
            backward = 2.5 * seen / (peak * share_back)
        return Piece(
            "attention",
            "FLOPs over the rate of published kernels (FlashAttention-2 and -3; unfused: passes "
            "over the scores)",
            forward,
            backward + (forward if again else 0.0),
        )

    def _unmasked_share(self) -> float:
        """Return the scores inside windows over those of causal attention, the mean of all layers.

        Of S positions, a window of w leaves S w - w^2 / 2 of S^2 / 2.
        """
        model, sequence = self.model, self.layout.batch.sequence_length
        assert isinstance(model, ModelConfig)
        if model.sliding_window is None or model.sliding_window >= sequence:
            return 1.0
        period = model.has_window
        windows = sum(period[layer % len(period)] for layer in range(model.num_hidden_layers))
        size = model.sliding_window / sequence
        return 1 - windows / model.num_hidden_layers * (1 - size) ** 2

    def _elementwise(self) -> Piece:
        """Time what moves through memory between the products.

        Two norms (four around blocks) and their residual sums read and write 4 d numbers a token
        forwards and 5 d backwards. Rotary positions read and write queries and keys. The activation
        reads F, or 2 F with a gate, and writes F. Its backward reads one input more, and writes as
        many numbers as the forward reads.
        """
        model, t = self.model, self.layout.mesh.tensor
        if isinstance(model, OwnModel):
            products = layer_of_rank(model, self.layout).products
            traced = sum(each.times * each.rows * (each.inner + each.columns) for each in products)
            return self._moved(traced, 2 * traced)
        heads = model.num_attention_heads + 2 * max(model.num_key_value_heads, t)
        rotated = 2 * heads * model.head_dim / t if model.position_embedding_type == "rope" else 0
        if model.has_latent_attention:  # queries and keys are put together, latents are normed
            rotated = 4 * model.num_attention_heads * model.head_dim / t + 4 * model.latent_width
        width = model.intermediate_size / t
        if model.is_moe:
            width = model.moe_intermediate_size * model.num_experts_per_tok
            width = (width + model.shared_expert_intermediate_size) / t
        read = 2 if model.gated else 1
        norms, d = (4 if model.sandwich_norm else 2) * self.own_tokens, model.hidden_size
        numbers = norms * 4 * d + self.tokens * (rotated + (read + 1) * width)
        back = norms * 5 * d + self.tokens * (rotated + (2 * read + 1) * width)
        if model.is_moe:  # permuted, and back with their gates
            numbers += 4 * self.tokens * model.num_experts_per_tok * d
            back += 4 * self.tokens * model.num_experts_per_tok * d
        return self._moved(numbers, back)

    def _moved(self, numbers: float, back: float) -> Piece:
        """Time numbers that move through memory, forwards and backwards."""
        forward = numbers * self.itemsize / self.bytes_per_second
        backward = back * self.itemsize / self.bytes_per_second
        if self.again("elementwise"):
            backward += forward
        return Piece(
            "norms and activations",
            "bytes through memory over its bandwidth",
            forward,
            backward,
            bytes=(numbers + back) * self.itemsize,
        )

    def _casts(self) -> Piece:
        """Time the casts to FP8: each factor is read in 16 bits, and written once along each dim.

        Hopper's FP8 products contract the last dim of both factors, so that a factor of two
        products is written twice, the second time transposed (TransformerEngine, "FP8 primer").
        """
        moved = self.itemsize + 2
        inputs = sum(each.inputs * each.rows * each.inner for each in self.products())
        outputs = sum(each.count * each.rows * each.columns for each in self.products())
        return Piece(
            "casts to FP8",
            "bytes through memory over its bandwidth (TransformerEngine's FP8 primer)",
            moved * inputs / self.bytes_per_second,
            moved * outputs / self.bytes_per_second,
            bytes=moved * (inputs + outputs),
        )

    def _copies(self) -> Piece:
        """Time the copies that put parts together, each of which reads and writes.

        Forwards they are queries, keys, values and what attention made. Backwards their gradients
        are; and for the gradients of weights both factors, but for the streams that enter, which
        are gathered whole (`geojax.models.parallel.entered_products`).
        """

        def width(part: str, size: Literal["inner", "columns"]) -> float:
            own = (each for each in self.products() if each.part == part)
            return sum(each.count * float(getattr(each, size)) for each in own)

        entering = [width(part, "columns") for part in REGIONS[::2]]
        leaving = [width(part, "inner") for part in REGIONS[1::2]]
        around = entering[0] + leaving[0]
        of_gradients = entering[1] + sum(leaving) + 2 * self.model.hidden_size
        forward, back = self.tokens * around, self.tokens * (around + of_gradients)
        moved = 2 * self.itemsize / self.bytes_per_second
        return Piece(
            "parts put together",
            "bytes through memory over its bandwidth",
            moved * forward,
            moved * back,
            bytes=2 * self.itemsize * (forward + back),
        )

    def _sums(self) -> Piece:
        """Time the sums of gradients over microbatches: read in 16 bits, read and written in 32.

        A product that adds to them in its epilogue reads and writes 32 bits besides its own work.
        """
        numbers = sum(each.count * each.inner * each.columns for each in self.products())
        if self.frozen:
            numbers = sum(map(math.prod, self._adapter_shapes)) / self.layout.mesh.tensor
        return self._sums_of(numbers)

    def _sums_of(self, numbers: float) -> Piece:
        if self.layout.batch.microbatches == 1:
            return Piece("sums of gradients", "one microbatch: there are none")
        moved: float = 4 if self.adds_in_products else self.itemsize + 8
        source = "bytes through memory over its bandwidth"
        if self.holds_chunks:
            # A stage turns to another chunk after as many microbatches as there are stages: it
            # copies the weights for both passes, puts sums back and copies others.
            turned = 4 * self.itemsize + (16 if self.adds_in_products else 0)
            moved += turned / self.layout.pipeline_stages
            source += ", and copies of a chunk where a stage turns to it"
        return Piece(
            "sums of gradients",
            source,
            weight=moved * numbers / self.bytes_per_second,
            bytes=moved * numbers,
        )

    def dense_layers(self) -> Iterator[Piece]:
        """Yield the work of the first dense layers: in the compute dtype, and all of it again."""
        if not self.model.first_k_dense_replace:
            return
        dense = self.model.model_copy(update={"num_experts": 0})
        for piece in dataclasses.replace(self.computed_again, model=dense).layer():
            yield piece.times(self.model.first_k_dense_replace)

    @property
    def computed_again(self) -> "LayerTimes":
        """The work of layers outside the stack: in the compute dtype, and all of it again."""
        precision = self.layout.precision
        if policy(precision).recipe is not None:
            precision = "bf16"
        return dataclasses.replace(
            self,
            layout=self.layout.changed(remat="full", precision=precision),
            execution=dataclasses.replace(self.execution, recomputes=None),
        )

    def later_tokens(self) -> Iterator[Piece]:
        """Yield the work of the modules for later tokens, but for their heads."""
        modules, d = self.model.num_nextn_predict_layers, self.model.hidden_size
        if not modules:
            return
        for piece in self.computed_again.layer():
            yield piece.times(modules)
        rate, tokens = self.rate(linear=False), self.own_tokens
        forward = rate.seconds(tokens, d, 2 * d)
        yield Piece(
            "projections of later tokens",
            "FLOPs over the peak and the fitted efficiency (geojax.planner.cost.matmul)",
            forward,
            forward + rate.seconds(tokens, 2 * d, d),
            rate.seconds(2 * d, d, tokens, out_itemsize=4),
        ).times(modules)
        yield self.embedding().times(modules)

    def embedding(self) -> Piece:
        """Time the look-up, which reads and writes rows, and its gradient, which adds to rows."""
        numbers = self.tokens * self.model.hidden_size * self.itemsize
        added = 0 if self.frozen else 3 * numbers
        return Piece(
            "embedding",
            "bytes through memory over its bandwidth",
            2 * numbers / self.bytes_per_second,
            weight=added / self.bytes_per_second,
            bytes=2 * numbers + added,
        )

    def head(self) -> Iterator[Piece]:
        """Yield the product with the vocabulary, and the loss, which passes over the logits.

        Each module for later tokens has them once more.

        Logits are written and read forwards, for their maximum and their sum, and read and written
        as gradients, in the compute dtype (`geojax.models.head`, which computes
        them in chunks).
        """
        rate, d = self.rate(linear=False), self.model.hidden_size
        tokens, columns = self.logits
        heads = 1 + self.model.num_nextn_predict_layers
        yield Piece(
            "head",
            "FLOPs over the peak and the fitted efficiency (geojax.planner.cost.matmul)",
            rate.seconds(tokens, columns, d),
            rate.seconds(tokens, d, columns),
            0.0 if self.frozen else rate.seconds(d, columns, tokens, out_itemsize=4),
        ).times(heads)
        logits = tokens * columns * self.itemsize
        yield Piece(
            "loss",
            "passes over the logits over the memory's bandwidth",
            2 * logits / self.bytes_per_second,
            3 * logits / self.bytes_per_second,
            bytes=5 * logits,
        ).times(heads)
        if self.execution.sums_head and not self.frozen:
            yield self._sums_of(heads * columns * d)
