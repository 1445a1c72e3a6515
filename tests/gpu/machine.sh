# For the scripts beside it: the repository as the place to be, its Python, and packages that the machine lacks from wheels/
# (made elsewhere by pip download -d wheels --no-deps diffusers imageio-ffmpeg scikit-image importlib-metadata zipp).
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
[ ! -d wheels ] || "$python" -m pip install -q --no-index --no-deps wheels/*.whl
