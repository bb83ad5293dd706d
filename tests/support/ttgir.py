"""What the text of Triton's dialect for GPUs shows of a compiled kernel."""

import re


def transposed_results(ttgir):
    """Return the lines that transpose what a product has computed.

    Compilers of Triton 3.4 to 3.7 for Hopper made wrong code of some products with such an operand
    (flash-linear-attention's issue 640). Results are followed through all operations, and through
    what loops carry.
    """
    computed = set()
    for _ in range(3):  # what one iteration of a loop yields, the next one reads
        found = []
        loops = []  # (name of the results, names of what is carried)
        for line in ttgir.splitlines():
            operation = re.match(r"\s*(?:(%\w+)(?::\d+)? = )?\"?([\w.]+)\"?(.*)", line)
            if not operation:
                continue
            result, name, operands = operation.groups()
            used = set(re.findall(r"%\w+(?:#\d+)?", operands))
            if name == "scf.for":
                carried = re.search(r"iter_args\((.*?)\) ->", operands)
                pairs = re.findall(r"(%\w+) = (%\w+(?:#\d+)?)", carried[1] if carried else "")
                computed |= {inner for inner, outer in pairs if outer in computed}
                loops.append((result, [inner for inner, _ in pairs]))
            elif name == "scf.yield" and loops:
                results, carried = loops.pop()
                yielded = re.findall(r"%\w+(?:#\d+)?", operands.split(" : ")[0])
                for i, value in enumerate(yielded[: len(carried)]):
                    if value in computed:
                        computed |= {carried[i], results, f"{results}#{i}"}
            elif result and ("dot" in name and "tensor<" in operands or used & computed):
                if name not in ("tt.reduce", "scf.if"):
                    computed |= {result, f"{result}#0"}
                if "trans" in name and used & computed:
                    found.append(line.strip()[:120])
    return found
