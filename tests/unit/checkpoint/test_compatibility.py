"""A checkpoint from before a key of models was added is one of the same model."""

from pathlib import Path

import pytest
from support.small_models import model_of

from geojax.checkpoint.reading.compatibility import refuse_other_model
from geojax.errors import UserError


def test_keys_that_are_missing_in_a_checkpoint_have_their_defaults():
    given = model_of("nemotron").model_dump(mode="json")
    rope = {key: given["rope_parameters"][key] for key in ("rope_type", "partial_rotary_factor")}
    saved = {key: value for key, value in given.items() if key != "use_qk_norm"}
    saved["rope_parameters"] = rope
    refuse_other_model(Path("run"), saved, given)
    with pytest.raises(UserError, match=r"model\.use_qk_norm is false there and true here"):
        refuse_other_model(Path("run"), saved, given | {"use_qk_norm": True})
    whole_head = {"rope_parameters": given["rope_parameters"] | {"partial_rotary_factor": 1.0}}
    with pytest.raises(UserError, match=r"partial_rotary_factor is 0\.5 there and 1\.0 here"):
        refuse_other_model(Path("run"), saved, given | whole_head)
