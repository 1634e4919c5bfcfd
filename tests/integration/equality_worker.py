"""One of several processes that compare a layout across all of them with one device."""

import sys

from geojax import runtime

if __name__ == "__main__":
    runtime.start()
    from support.equality import check_layout

    check_layout("llama", "fp64", 1e-10, sys.argv[1])
    check_layout("llama", "fp32", 1e-5, sys.argv[1])
    print("equal")
    runtime.finish()
