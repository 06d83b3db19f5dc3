#!/usr/bin/env bash
# Gather what Keel needs beside torch, for a machine that reaches no package index: tests/gpu/wheels.sh FOLDER [PYTHON]
#
# PYTHON is the version there, such as 3.12 (the default). On the machine:
#
#     pip install --no-index --no-deps --target SITE FOLDER/*.whl
#     PYTHONPATH=SITE:. python3 -m tests.gpu.first_half_hour right
set -euo pipefail
folder=$1 version=${2:-3.12}
packages=(pydantic pydantic_core annotated-types typing-inspection tomli xxhash torchao)
cd "$(dirname "$0")/../.."
for package in "${packages[@]}"; do # those of this environment, which fit each other
    installed=$(python3 -m pip show "$package" 2>/dev/null | sed -n 's/^Version: //p' || true) # one may not be here
    wanted+=("$package${installed:+==$installed}")
done
platforms=(manylinux1_x86_64 manylinux2014_x86_64)
for glibc in 17 24 27 28 31 34; do
    platforms+=("manylinux_2_${glibc}_x86_64")
done
python3 -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version "$version" \
    "${platforms[@]/#/--platform=}" --dest "$folder" "${wanted[@]}"
python3 - "$folder"/*.whl <<'END' # LZMA in place of deflate: 4.5 MB instead of 6.7; pip reads both
import os
import sys
from zipfile import ZIP_LZMA, ZipFile

for wheel in sys.argv[1:]:
    smaller = f"{wheel}.part"
    with ZipFile(wheel) as source, ZipFile(smaller, "w") as target:
        for member in source.infolist():
            target.writestr(member, source.read(member), ZIP_LZMA)
    os.replace(smaller, wheel)
END
du -ch "$folder"/*.whl
