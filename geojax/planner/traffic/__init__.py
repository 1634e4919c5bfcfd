"""The terms of the cost model that are bytes, by formula: of weights, gradients, activations.

They time layouts by the thousand, without a trace. What a step's program sends is counted in it
(`geojax.planner.step_traffic`), and a test holds these terms to that count.
"""
