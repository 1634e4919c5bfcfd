"""One program that runs a table of ticks on all stages, with a model's own functions."""

from geojax.models.chunk.chunk import Microbatch as Microbatch
from geojax.models.chunk.chunk import ModelFunctions as ModelFunctions
from geojax.pipeline.execution.early_parts import EarlyReduction as EarlyReduction
from geojax.pipeline.execution.executor import Executor as Executor
from geojax.pipeline.execution.late_chunks import LateChunks as LateChunks
from geojax.pipeline.execution.stage_weights import PipelineGradients as PipelineGradients
from geojax.pipeline.execution.stage_weights import StageWeights as StageWeights
from geojax.pipeline.execution.tick_program import TickProgram as TickProgram
