"""The same models written once more: numpy, one head, position and layer at a time.

Everything is analytic in the parameters (maxima are taken of real parts), so that a complex step
gives derivatives that are exact to rounding: Squire and Trapp 1998.
"""

import numpy as np


def plain_loss(parameters, batch, config):
    """The masked sum of cross-entropies, and the balance losses of a mixture."""
    outputs = [_row(parameters, batch, config, row) for row in range(len(batch["tokens"]))]
    logits = [logits for logits, _, _ in outputs]
    total = sum(
        _later_tokens(parameters, stream, batch, config, row)
        for row, (_, _, stream) in enumerate(outputs)
    )
    if config.is_moe:
        targets = batch["loss_mask"].astype(float).sum(axis=1)
        balances = [balance for _, balance, _ in outputs]
        total = total + targets @ np.array(balances)
    for row, column in np.ndindex(*batch["targets"].shape):
        loss = _cross_entropy(logits[row][column], batch["targets"][row, column])
        total = total + float(batch["loss_mask"][row, column]) * loss
    return total


def _cross_entropy(scores, target):
    top = scores.real.max()
    return top + np.log(np.exp(scores - top).sum()) - scores[target]


def _later_tokens(parameters, stream, batch, config, row):
    """What the modules for later tokens add to the loss of a row; they see its `stream`, normed."""
    table, total = parameters["embedding"]["tokens"]["embedding"], 0.0
    targets, mask = batch["targets"][row], batch["loss_mask"][row].astype(float)
    segments, positions = batch["segment_ids"][row], batch["positions"][row]
    for depth in range(1, config.num_nextn_predict_layers + 1):
        own = _layer(parameters["mtp"], depth - 1)
        last = len(targets) - depth
        seen = [here for here in range(last) if segments[here] == segments[here + depth]]
        after = [here + depth for here in seen]
        embedded = _norm(own["embedding_norm"], table[targets[[k - 1 for k in after]]], config)
        joined = [embedded, _norm(own["stream_norm"], stream[seen], config)]
        x, balance = _through_layer(
            _linear(own["projection"], np.concatenate(joined, axis=1)),
            own["layers"], positions[seen], segments[seen], config,
        )  # fmt: skip
        x = _norm(own["final_norm"], x, config)
        stream = np.zeros(stream.shape, x.dtype)
        stream[seen] = x
        logits = _head(parameters, x, config)
        losses = [_cross_entropy(*pair) for pair in zip(logits, targets[after], strict=True)]
        weight = config.mtp_loss_scaling_factor / config.num_nextn_predict_layers
        total = total + weight * (mask[after] @ np.array(losses)) + mask[after].sum() * balance
    return total


def plain_logits(parameters, batch, config):
    return np.stack(
        [_row(parameters, batch, config, row)[0] for row in range(len(batch["tokens"]))]
    )


def _row(parameters, batch, config, row):
    """Logits, the sum of the layers' balance losses, and the stream after the final norm."""
    table = parameters["embedding"]["tokens"]["embedding"]
    x, balance = table[batch["tokens"][row]], 0.0
    positions, segments = batch["positions"][row], batch["segment_ids"][row]
    if config.position_embedding_type == "learned_absolute":
        x = x + parameters["embedding"]["positions"]["embedding"][positions]
    for index in range(config.num_hidden_layers):
        own = _layer(parameters["layers"], index)
        x, added = _through_layer(x, own, positions, segments, config)
        balance = balance + added
    x = _norm(parameters["final_norm"], x, config)
    return _head(parameters, x, config), balance, x


def _through_layer(x, own, positions, segments, config):
    normed = _norm(own["attention_norm"], x, config)
    x = x + _attention(own["attention"], normed, positions, segments, config)
    normed = _norm(own["feed_forward_norm"], x, config)
    if config.is_moe:
        added, balance = plain_mixture(own, normed, segments, config)
        return x + added, balance
    return x + _feed_forward(own["feed_forward"], normed, config), 0.0


def _head(parameters, normed, config):
    if config.tie_word_embeddings:
        return normed @ parameters["embedding"]["tokens"]["embedding"].T
    return normed @ parameters["head"]["kernel"]


def _layer(tree, index):
    return {k: _layer(v, index) if isinstance(v, dict) else v[index] for k, v in tree.items()}


def _norm(own, x, config):
    if config.norm == "rmsnorm":
        return x / np.sqrt((x * x).mean(1, keepdims=True) + config.rms_norm_eps) * own["scale"]
    centered = x - x.mean(1, keepdims=True)
    normed = centered / np.sqrt((centered**2).mean(1, keepdims=True) + config.rms_norm_eps)
    scale = own["scale"] + 1 if config.norm == "layernorm1p" else own["scale"]
    return normed * scale + own["bias"]


def _linear(own, x):
    return x @ own["kernel"] + own.get("bias", 0.0)


def _attention(own, x, positions, segments, config):
    dim, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    query, key, value = (_linear(own[name], x) for name in ("query", "key", "value"))
    if config.use_qk_norm:
        query, key = (
            _norm(own[name], heads.reshape(-1, dim), config).reshape(heads.shape)
            for name, heads in (("query_norm", query), ("key_norm", key))
        )
    arrays = (query, key, value, *([own["sinks"]] if config.use_attention_sinks else []))
    mixed = np.zeros((len(x), config.num_attention_heads * dim), dtype=np.result_type(*arrays))
    for head in range(config.num_attention_heads):
        of_query = slice(head * dim, (head + 1) * dim)
        of_key = slice(head // group * dim, (head // group + 1) * dim)
        q, k = (_turned(part, positions, config) for part in (query[:, of_query], key[:, of_key]))
        for here in range(len(x)):
            seen = [s for s in range(here + 1) if segments[s] == segments[here]]
            scores = k[seen] @ q[here] / np.sqrt(dim)
            weights = np.exp(scores - scores.real.max())
            total = weights.sum()
            if config.use_attention_sinks:
                total = total + np.exp(own["sinks"][head] - scores.real.max())
            mixed[here, of_query] = weights @ value[seen, of_key] / total
    return _linear(own["output"], mixed)


def _turned(vectors, positions, config):
    return np.stack([_turn(v, p, config) for v, p in zip(vectors, positions, strict=True)])


def _turn(vector, position, config):
    if config.position_embedding_type == "learned_absolute":
        return vector
    turned, half = vector.copy(), config.rotary_dim // 2
    for pair in range(half):
        frequency = config.rope_parameters.rope_theta ** (-2 * pair / config.rotary_dim)
        if config.rope_parameters.rope_type == "llama3":
            frequency = _scaled(frequency, config.rope_parameters)
        c, s = np.cos(position * frequency), np.sin(position * frequency)
        a, b = vector[pair], vector[pair + half]
        turned[pair], turned[pair + half] = a * c - b * s, b * c + a * s
    return turned


def _scaled(frequency, rope):
    wavelength = 2 * np.pi / frequency
    if wavelength < rope.original_max_position_embeddings / rope.high_freq_factor:
        return frequency
    if wavelength > rope.original_max_position_embeddings / rope.low_freq_factor:
        return frequency / rope.factor
    smooth = (rope.original_max_position_embeddings / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def _feed_forward(own, x, config):
    up = _linear(own["up"], x)
    if config.hidden_act == "silu":
        gate = _linear(own["gate"], x)
        if limit := config.swiglu_limit:
            gate = np.where(gate.real > limit, limit, gate)
            up = 1 + np.where(np.abs(up.real) > limit, np.sign(up.real) * limit, up)
        alpha = config.swiglu_alpha if limit else 1.0
        middle = gate / (1 + np.exp(-alpha * gate)) * up
    elif config.hidden_act == "relu2":
        middle = np.where(up.real > 0, up, 0) ** 2
    else:
        inner = np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)
        middle = 0.5 * up * (1 + np.tanh(inner))
    return _linear(own["down"], middle)


def plain_mixture(own, x, segments, config):
    """What the experts add to one row, and its weighted losses: one token after the other."""
    experts, choices = config.num_experts, config.num_experts_per_tok
    capacity = len(x)
    if config.capacity_factor is not None:
        capacity = np.ceil(config.capacity_factor * len(x) * choices / experts)
    out = [np.zeros(x.shape[1]) for _ in x]
    load, chosen, mass, squares, real = np.zeros(experts), np.zeros(experts), 0.0, 0.0, 0
    for column, token in enumerate(x):
        if config.n_shared_experts:
            out[column] = out[column] + _feed_forward(own["shared_experts"], token, config)
        if segments[column] == 0:
            continue
        scores = _linear(own["router"], token)
        weights = np.exp(scores - scores.real.max())
        probabilities = weights / weights.sum()
        best = sorted(range(experts), key=lambda expert: (-scores[expert].real, expert))[:choices]
        shared_out = probabilities[best].sum() if config.norm_topk_prob else 1.0
        for expert in best:
            chosen[expert] += 1
            if load[expert] < capacity:
                load[expert] += 1
                of_expert = _layer(own["experts"], expert)
                gate = probabilities[expert] / shared_out
                out[column] = out[column] + gate * _feed_forward(of_expert, token, config)
        mass, real = mass + probabilities, real + 1
        squares += (scores.real.max() + np.log(weights.sum())) ** 2
    if real == 0:
        return np.stack(out), 0.0
    balance = experts * (chosen / (choices * real)) @ (mass / real)
    losses = config.router_aux_loss_coef * balance + config.router_z_loss_coef * squares / real
    return np.stack(out), losses
