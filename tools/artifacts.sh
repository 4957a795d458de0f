#!/usr/bin/env bash
# Builds the wheel and the sdist into dist/, checks them, and writes the SBOM of a project with the wheel to
# sbom.cdx.json. `tox -e artifacts` installs the required programs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -rf dist
python -m build --outdir dist .
# Reproduce the build in another directory and with other permissions.
mkdir "$work/copy"
git ls-files -z | xargs -0 cp --parents --preserve=mode -t "$work/copy"
chmod -R go= "$work/copy"
(umask 077 && python -m build --outdir "$work/dist" "$work/copy")
for file in dist/*; do cmp "$file" "$work/$file"; done

twine check --strict dist/*
check-wheel-contents dist/*.whl
# pyroma deducts a point for each that is not set. The release workflow sets both.
missing=0
[ -n "${CONTACT_EMAIL:-}" ] || missing=$((missing + 1))
[ -n "${REPOSITORY_URL:-}" ] || missing=$((missing + 1))
pyroma --min $((10 - missing)) dist/*.tar.gz

mkdir "$work/sdist"
tar -xzf dist/*.tar.gz -C "$work/sdist" --strip-components=1
diff <(git ls-files | LC_ALL=C sort) \
    <(cd "$work/sdist" && find . -type f ! -path ./PKG-INFO | cut -c3- | LC_ALL=C sort)

# A project's environment contains only the wheel and its dependencies.
python -m venv --without-pip "$work/project"
python -m pip --python "$work/project/bin/python" install -q dist/*.whl
cyclonedx-py environment --output-reproducible --output-file sbom.cdx.json "$work/project/bin/python"

# Run the sdist's tests on the sdist's package.
cd "$work/sdist"
python -m pip --python "$work/project/bin/python" install -q --group base .
"$work/project/bin/python" -m pytest -q --timeout=240 --ds=tests.base.settings --database=sqlite tests/base tests/unit
