"""Lists what users of the last release would miss: public names and arguments that are gone or have changed.

Public is what `fxopt`, `fxopt.testing`, `fxopt.optimization` and `fxopt.tuning` name. A version that only changes its last
number may break none.
"""

import subprocess
import sys

import griffe

PUBLIC = ("testing", "optimization", "tuning")


def main(last: str) -> int:
    """Compare the working tree with a release, and say what breaks."""
    old = griffe.load_git("fxopt", ref=last, search_paths=["."], resolve_aliases=True)
    new = griffe.load("fxopt", search_paths=["."], resolve_aliases=True)
    paths = public_paths(old)
    broken = [b for b in griffe.find_breaking_changes(old, new) if is_public(b.obj.path, paths)]
    version = str(new["version.__version__"].value).strip("\"'")
    print(f"## Public names of {version}, beside {last}")
    for breakage in broken:
        print(breakage.explain(griffe.ExplanationStyle.MARKDOWN))
    if not broken:
        print("Nothing breaks.")
    is_patch = version.rpartition(".")[0] == last.removeprefix("v").rpartition(".")[0]
    if broken and is_patch:
        print(f"{version} changes the last number alone: it may not break what {last} has.", file=sys.stderr)
    return int(bool(broken) and is_patch)


def public_paths(package: griffe.Object) -> set[str]:
    """The names that users import, and where these are defined."""
    found = set[str]()
    for module in (package, *(package[name] for name in PUBLIC if name in package.members)):
        for member in module.members.values():
            if module.exports is None:  # then what is defined there, and not what is imported
                exported = not member.is_alias and not member.name.startswith("_")
            else:
                exported = member.is_exported
            if exported:
                found |= {member.path, member.canonical_path}
    return found


def is_public(path: str, public: set[str]) -> bool:
    """Tell whether a path is one of those, or a public part of one."""
    parents = (path[:end] for end, sign in enumerate(path + ".") if sign == ".")
    return any(parent in public for parent in parents)


def last_release() -> str | None:
    """The newest tag before this commit."""
    command = ["git", "describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^"]
    described = subprocess.run(command, capture_output=True, text=True, check=False)
    return described.stdout.strip() or None


if __name__ == "__main__":
    before = sys.argv[1] if len(sys.argv) > 1 else last_release()
    if before:
        sys.exit(main(before))
    print("There is no release before this one.")
