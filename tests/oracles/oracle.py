"""What transformers computes of a batch of packed documents."""

import torch


def packed_logits_and_loss(model, batch):
    """Logits, and the mean of the masked losses, of documents each of which the model sees alone.

    There is no mask of ours: an error in one would hide in what it is compared with.
    """
    rows = zip(batch["tokens"].long(), batch["segment_ids"], strict=True)
    found = torch.stack([_logits_of_row(model, *row) for row in rows])
    losses = torch.nn.functional.cross_entropy(
        found.transpose(1, 2), batch["targets"].long(), reduction="none"
    )
    mask = batch["loss_mask"].to(found.dtype)
    return found, (losses * mask).sum() / mask.sum()


def _logits_of_row(model, tokens, segments):
    lengths = torch.unique_consecutive(segments, return_counts=True)[1]
    documents = tokens.split(lengths.tolist())
    found = [model(input_ids=each[None], use_cache=False).logits[0] for each in documents]
    return torch.cat(found)
