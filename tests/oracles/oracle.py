"""What transformers computes of a batch of packed documents."""

import torch


def packed_logits_and_loss(model, batch):
    """Logits, and the mean of the masked losses, with attention within each document alone."""
    found = model(
        input_ids=batch["tokens"].long(),
        attention_mask=masks(model, batch["segment_ids"]),
        position_ids=batch["positions"].long(),
        use_cache=False,
    ).logits
    losses = torch.nn.functional.cross_entropy(
        found.transpose(1, 2), batch["targets"].long(), reduction="none"
    )
    mask = batch["loss_mask"].to(found.dtype)
    return found, (losses * mask).sum() / mask.sum()


def masks(model, segments):
    """What is added to the scores; of models with several kinds of layers, by kind."""
    same = (segments[:, :, None] == segments[:, None, :]).tril()[:, None]
    window = getattr(model.config, "sliding_window", None)
    near = same if window is None else same.triu(1 - window)
    full, sliding = (
        torch.where(visible, 0.0, torch.finfo(model.dtype).min).to(model.dtype)
        for visible in (same, near)
    )
    if hasattr(model.config, "layer_types"):
        return {"full_attention": full, "sliding_attention": sliding}
    return sliding
