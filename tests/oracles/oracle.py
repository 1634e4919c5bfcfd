"""What transformers computes of a batch of packed documents."""

import torch


def packed_logits_and_loss(model, batch):
    """Logits, and the mean of the masked losses, with attention within each document alone."""
    segments = batch["segment_ids"]
    visible = (segments[:, :, None] == segments[:, None, :]).tril()[:, None]
    found = model(
        input_ids=batch["tokens"].long(),
        attention_mask=torch.where(visible, 0.0, torch.finfo(model.dtype).min).to(model.dtype),
        position_ids=batch["positions"].long(),
        use_cache=False,
    ).logits
    losses = torch.nn.functional.cross_entropy(
        found.transpose(1, 2), batch["targets"].long(), reduction="none"
    )
    mask = batch["loss_mask"].to(found.dtype)
    return found, (losses * mask).sum() / mask.sum()
