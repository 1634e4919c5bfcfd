"""Links between the sites of a run: measured, compared with the plan, and agreed on."""
