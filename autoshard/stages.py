from autoshard.segments import segments


class Part:
    def __init__(self, name, segment):
        self.name, self.segment = name, segment


def parts(program):
    seen = {}
    out = []
    for i, s in enumerate(segments(program.graph)):
        n = s.name.replace(" ", "_").replace(",", "_")
        seen[n] = seen.get(n, 0) + 1
        out.append(Part(n if seen[n] == 1 else f"{n}@{seen[n] - 1}", i))
    return out


def balanced(parts, stages):
    return [min(stages - 1, i * stages // len(parts)) for i in range(len(parts))]


def write(parts, of):
    return "|".join(
        ",".join(p.name for p, s in zip(parts, of) if s == k) for k in range(max(of) + 1)
    )


def parse(text, parts, stages):
    m = {n: k for k, t in enumerate(text.split("|")) for n in t.split(",")}
    return [m[p.name] for p in parts]


def of_segments(program, parts, of):
    return of


def labels(parts, of):
    return tuple(tuple(p.name for p, s in zip(parts, of) if s == k) for k in range(max(of) + 1))
