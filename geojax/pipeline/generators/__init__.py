"""Generators: pipeline schedules from counts, costs and a memory limit."""

from geojax.pipeline.generators.interleaved import interleaved as interleaved
from geojax.pipeline.generators.latency_hiding import latency_hiding as latency_hiding
from geojax.pipeline.generators.warmup import geopipe as geopipe
from geojax.pipeline.generators.warmup import gpipe as gpipe
from geojax.pipeline.generators.warmup import one_forward_one_backward as one_forward_one_backward
from geojax.pipeline.generators.zero_bubble import zero_bubble_h1 as zero_bubble_h1
from geojax.pipeline.generators.zero_bubble import zero_bubble_h2 as zero_bubble_h2
from geojax.pipeline.generators.zero_bubble_v import zbv as zbv
