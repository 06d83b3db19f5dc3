/* A CUDA device that computes nothing.
 *
 * Preloaded into a process under the name of the driver's library, libcuda.so.1, it takes the calls that torch's CUDA
 * build makes of the driver, the runtime, cuBLAS and NCCL, and lets all of them succeed at once. Everything on the
 * host's side of these calls is torch's own: the caching allocator, streams and events, autograd's device threads,
 * FSDP, inductor and Triton's compiler, process groups. So a training step runs as on a GPU but for its values, and
 * what it asks of the device can be counted: launches, copies, synchronizations, collectives, bytes.
 *
 * Whatever the host reads from the device is zero: a loss and a norm of zero are finite, and no run depends on what was
 * in a reused piece of memory before. Device memory takes address space, but no memory of the machine.
 *
 * tests/null_gpu/device.py builds and loads it. Counters are read by `null_gpu_count(name)` and zeroed by
 * `null_gpu_reset()`. The environment variable KEEL_NULL_GPUS says how many devices there are (default 1).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "driver_types.h"

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, INSUFFICIENT_DRIVER = 35, NO_DEVICE = 100, NOT_SUPPORTED = 801 };
static const size_t DEVICE_BYTES = (size_t)143771 << 20; /* of an H200, as nvidia-smi shows it */
static const size_t PAGE = 4096, ALIGNMENT = (size_t)2 << 20;

/* ------------------------------------------------------------------------------------------------------- counters */

#define COUNTERS(X)                                                                                                    \
    X(launch_aten) X(launch_triton) X(gemm)                                                                            \
    X(copy_to_device) X(copy_to_host) X(copy_on_device) X(fill)                                                        \
    X(sync_stream) X(sync_device) X(sync_event) X(sync_copy)                                                           \
    X(allocation) X(pinned_allocation) X(event_record) X(stream_wait)                                                  \
    X(collective) X(communicator)

#define DECLARE(name) static _Atomic long name##_count;
COUNTERS(DECLARE)
static double idle_since; /* a synchronization that no launch has followed */
static double idle_seconds; /* from synchronizations to the launches that followed */

long null_gpu_count(const char *name) {
#define GET(counter)                                                                                                   \
    if (!strcmp(name, #counter)) return counter##_count;
    COUNTERS(GET)
    return -1;
}

const char *null_gpu_names(void) {
#define NAME(counter) #counter " "
    return COUNTERS(NAME);
}

void null_gpu_reset(void) {
#define ZERO(counter) counter##_count = 0;
    COUNTERS(ZERO)
    idle_since = idle_seconds = 0;
}

/* CPU seconds of the process. */
static double cpu_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

/* CPU seconds that the host took, after each synchronization, to its next launch: a device had nothing to do then. */
double null_gpu_idle_seconds(void) { return idle_seconds; }

static _Atomic int block_ms;

/* The next launch of a Triton kernel blocks the host for so long, as if the device hung and its queue were full. */
void null_gpu_block(int milliseconds) { block_ms = milliseconds; }

static int launched(_Atomic long *counter) {
    if (counter == &launch_triton_count) {
        usleep(1000 * block_ms);
        block_ms = 0;
    }
    if (idle_since) {
        idle_seconds += cpu_seconds() - idle_since;
        idle_since = 0;
    }
    ++*counter;
    return SUCCESS;
}

static int synchronized(_Atomic long *counter) {
    idle_since = cpu_seconds();
    ++*counter;
    return SUCCESS;
}

/* --------------------------------------------------------------------------------------------------------- memory */

typedef enum { DEVICE, PINNED, RESERVED } Kind; /* reserved: addresses of the device, whose memory is counted apart */
typedef struct {
    char *start;
    size_t size;
    Kind kind;
} Block;

static Block blocks[1 << 16];
static int n_blocks;
static size_t used_bytes;
static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;

static int allocate(void **pointer, size_t size, Kind kind) {
    size = (size + PAGE - 1) & ~(PAGE - 1);
    *pointer = NULL;
    pthread_mutex_lock(&blocks_lock);
    int is_full = (kind == DEVICE && used_bytes + size > DEVICE_BYTES) || n_blocks == sizeof blocks / sizeof *blocks;
    char *mapped = is_full ? MAP_FAILED
                           : mmap(NULL, size + ALIGNMENT, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped != MAP_FAILED) {
        char *start = (char *)(((uintptr_t)mapped + ALIGNMENT - 1) & ~(uintptr_t)(ALIGNMENT - 1));
        if (start > mapped) munmap(mapped, start - mapped);
        munmap(start + size, mapped + ALIGNMENT - start);
        if (kind == DEVICE) used_bytes += size;
        blocks[n_blocks++] = (Block){start, size, kind};
        *pointer = start;
    }
    pthread_mutex_unlock(&blocks_lock);
    return *pointer ? SUCCESS : OUT_OF_MEMORY;
}

/* Call with the lock held. */
static Block *block_of(const void *pointer) {
    for (int i = n_blocks - 1; i >= 0; i--)
        if ((char *)pointer >= blocks[i].start && (char *)pointer < blocks[i].start + blocks[i].size) return &blocks[i];
    return NULL;
}

static int release(void *pointer) {
    pthread_mutex_lock(&blocks_lock);
    Block *block = block_of(pointer);
    if (block) {
        if (block->kind == DEVICE) used_bytes -= block->size;
        munmap(block->start, block->size);
        *block = blocks[--n_blocks];
    }
    pthread_mutex_unlock(&blocks_lock);
    return SUCCESS;
}

static int is_on_device(const void *pointer) {
    pthread_mutex_lock(&blocks_lock);
    Block *block = block_of(pointer);
    int answer = block && block->kind != PINNED;
    pthread_mutex_unlock(&blocks_lock);
    return answer;
}

/* Expandable segments: address space is reserved, and pieces of memory are mapped into it. */

static int refuses_mapping;

/* As the drivers of some virtual machines do. */
void null_gpu_refuse_mapping(int refuses) { refuses_mapping = refuses; }

int cuMemAddressReserve(void **pointer, size_t size, size_t alignment, void *wanted, unsigned long long flags) {
    if (refuses_mapping || getenv("KEEL_NULL_GPU_REFUSES_MAPPING")) return NOT_SUPPORTED;
    return allocate(pointer, size, RESERVED);
}
int cuMemAddressFree(void *pointer, size_t size) { return release(pointer); }
/* The handle of a piece is its size. */
int cuMemCreate(unsigned long long *handle, size_t size, const void *properties, unsigned long long flags) {
    pthread_mutex_lock(&blocks_lock);
    int is_full = used_bytes + size > DEVICE_BYTES;
    if (!is_full) used_bytes += size;
    pthread_mutex_unlock(&blocks_lock);
    if (is_full) return OUT_OF_MEMORY;
    allocation_count++;
    *handle = size;
    return SUCCESS;
}
int cuMemRelease(unsigned long long handle) {
    pthread_mutex_lock(&blocks_lock);
    used_bytes -= handle;
    pthread_mutex_unlock(&blocks_lock);
    return SUCCESS;
}
int cuMemMap(void *pointer, size_t size, size_t offset, unsigned long long handle, unsigned long long flags) {
    return SUCCESS;
}
int cuMemSetAccess(void *pointer, size_t size, const void *access, size_t count) { return SUCCESS; }
int cuMemUnmap(void *pointer, size_t size) { return madvise(pointer, size, MADV_DONTNEED), SUCCESS; }

int cudaMalloc(void **pointer, size_t size) {
    allocation_count++;
    return allocate(pointer, size, DEVICE);
}
int cudaMallocAsync(void **pointer, size_t size, void *stream) { return cudaMalloc(pointer, size); }
int cudaFree(void *pointer) { return release(pointer); }
int cudaFreeAsync(void *pointer, void *stream) { return release(pointer); }
int cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    pinned_allocation_count++;
    return allocate(pointer, size, PINNED);
}
int cudaFreeHost(void *pointer) { return release(pointer); }

static int refuses_pinning, pinning_ms, last_error;

/* The next time that memory is pinned, it takes so long. */
void null_gpu_pin_slowly(int milliseconds) { pinning_ms = milliseconds; }

/* As some sandboxes do. The error stays until it is read, and a launch that reads it fails. */
void null_gpu_refuse_pinning(int refuses) { refuses_pinning = refuses; }

int cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    pinned_allocation_count++;
    usleep(1000 * __atomic_exchange_n(&pinning_ms, 0, __ATOMIC_SEQ_CST));
    return refuses_pinning ? (last_error = NOT_SUPPORTED) : SUCCESS;
}
int cudaGetLastError(void) { return __atomic_exchange_n(&last_error, SUCCESS, __ATOMIC_SEQ_CST); }
int cudaPeekAtLastError(void) { return last_error; }
int cudaHostUnregister(void *pointer) { return SUCCESS; }
int cudaGetSymbolAddress(void **pointer, const void *symbol) { return allocate(pointer, PAGE, DEVICE); }
int cudaMemGetInfo(size_t *available, size_t *total) {
    *available = DEVICE_BYTES - used_bytes;
    *total = DEVICE_BYTES;
    return SUCCESS;
}
int cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes);
    pthread_mutex_lock(&blocks_lock);
    Block *block = block_of(pointer);
    attributes->type = !block                   ? cudaMemoryTypeUnregistered
                       : block->kind == PINNED ? cudaMemoryTypeHost
                                               : cudaMemoryTypeDevice;
    pthread_mutex_unlock(&blocks_lock);
    attributes->devicePointer = attributes->hostPointer = block ? (void *)pointer : NULL;
    return SUCCESS;
}

static void copy(void *to, const void *from, size_t size, int direction) {
    if (direction == cudaMemcpyDefault) {
        int reads_device = is_on_device(from), writes_device = is_on_device(to);
        direction = reads_device && writes_device ? cudaMemcpyDeviceToDevice
                    : reads_device                ? cudaMemcpyDeviceToHost
                                                  : cudaMemcpyHostToDevice;
    }
    if (direction == cudaMemcpyHostToDevice) copy_to_device_count++;
    if (direction == cudaMemcpyDeviceToDevice) copy_on_device_count++;
    if (direction == cudaMemcpyDeviceToHost) copy_to_host_count++, memset(to, 0, size);
    if (direction == cudaMemcpyHostToHost) memcpy(to, from, size);
}
int cudaMemcpy(void *to, const void *from, size_t size, int direction) {
    copy(to, from, size, direction);
    return synchronized(&sync_copy_count);
}
int cudaMemcpyAsync(void *to, const void *from, size_t size, int direction, void *stream) {
    copy(to, from, size, direction);
    return SUCCESS;
}
int cudaMemcpy2DAsync() { return copy_on_device_count++, SUCCESS; }
int cudaMemcpyPeerAsync() { return copy_on_device_count++, SUCCESS; }
int cudaMemcpyToSymbol() { return synchronized(&sync_copy_count); }
int cudaMemset() { return fill_count++, SUCCESS; }
int cudaMemsetAsync() { return fill_count++, SUCCESS; }

/* -------------------------------------------------------------------------------------------------------- devices */

static __thread int current_device;

enum { RUNTIME_VERSION = 13000 };

static int n_devices(void) {
    const char *wanted = getenv("KEEL_NULL_GPUS"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible && !*visible) return 0;
    return wanted ? atoi(wanted) : 1;
}

static int driver_version(void) {
    const char *wanted = getenv("KEEL_NULL_GPU_DRIVER");
    return wanted ? atoi(wanted) : RUNTIME_VERSION;
}

int cudaGetDeviceCount(int *count) {
    if (driver_version() < RUNTIME_VERSION) return INSUFFICIENT_DRIVER;
    *count = n_devices();
    return *count ? SUCCESS : NO_DEVICE;
}
int cudaGetDevice(int *device) { return *device = current_device, SUCCESS; }
int cudaSetDevice(int device) { return current_device = device, SUCCESS; }
int cudaDriverGetVersion(int *version) { return *version = driver_version(), SUCCESS; }
int cudaRuntimeGetVersion(int *version) { return *version = RUNTIME_VERSION, SUCCESS; }
int cudaDeviceSynchronize(void) { return synchronized(&sync_device_count); }
int cudaDeviceCanAccessPeer(int *answer, int device, int peer) { return *answer = 1, SUCCESS; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, SUCCESS; }
int cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", device + 1);
    return SUCCESS;
}

/* As an H200 answers. */
int cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    *properties = (struct cudaDeviceProp){
        .name = "NVIDIA H200",
        .major = 9,
        .minor = 0,
        .totalGlobalMem = DEVICE_BYTES,
        .multiProcessorCount = 132,
        .l2CacheSize = 60 << 20,
        .memoryBusWidth = 6144,
        .warpSize = 32,
        .maxThreadsPerBlock = 1024,
        .maxThreadsPerMultiProcessor = 2048,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .regsPerBlock = 65536,
        .regsPerMultiprocessor = 65536,
        .sharedMemPerBlock = 49152,
        .sharedMemPerBlockOptin = 232448,
        .sharedMemPerMultiprocessor = 233472,
        .totalConstMem = 65536,
        .textureAlignment = 512,
        .asyncEngineCount = 3,
        .concurrentKernels = 1,
        .cooperativeLaunch = 1,
        .managedMemory = 1,
        .unifiedAddressing = 1,
        .pciBusID = 1 + device,
    };
    return SUCCESS;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
        case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
        case cudaDevAttrMultiProcessorCount: *value = 132; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
        case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
        case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
        case cudaDevAttrL2CacheSize: *value = 60 << 20; break;
        case cudaDevAttrGlobalMemoryBusWidth: *value = 6144; break;
        case cudaDevAttrClockRate: *value = 1980000; break;
        case cudaDevAttrMemoryClockRate: *value = 3201000; break;
        default: *value = 1; /* the rest are answered as abilities that the device has */
    }
    return SUCCESS;
}

const char *cudaGetErrorString(int error) { return error == OUT_OF_MEMORY ? "out of memory" : "no error"; }
const char *cudaGetErrorName(int error) { return error == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : "cudaSuccess"; }

/* --------------------------------------------------------------------------------------------- streams and events */

/* A handle that is no address of anything. */
static int make_handle(void **handle) {
    static _Atomic uintptr_t next = 0x1000;
    *handle = (void *)(next += 64);
    return SUCCESS;
}

int cudaStreamCreate(void **stream) { return make_handle(stream); }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return make_handle(stream); }
int cudaStreamGetPriority(void *stream, int *priority) { return *priority = 0, SUCCESS; }
int cudaStreamIsCapturing(void *stream, int *status) { return *status = cudaStreamCaptureStatusNone, SUCCESS; }
int cuStreamIsCapturing(void *stream, int *status) { return cudaStreamIsCapturing(stream, status); }
int cudaStreamGetCaptureInfo(void *stream, int *status, void *id, void *graph, void *nodes, void *edges, void *count) {
    return *status = cudaStreamCaptureStatusNone, SUCCESS;
}
int cudaStreamSynchronize(void *stream) { return synchronized(&sync_stream_count); }
int cudaStreamWaitEvent() { return stream_wait_count++, SUCCESS; }
int cudaEventCreate(void **event) { return make_handle(event); }
int cudaEventCreateWithFlags(void **event, unsigned flags) { return make_handle(event); }
int cudaEventRecord() { return event_record_count++, SUCCESS; }
int cudaEventRecordWithFlags() { return event_record_count++, SUCCESS; }
int cudaEventSynchronize() { return synchronized(&sync_event_count); }
int cudaEventElapsedTime(float *milliseconds, void *start, void *end) { return *milliseconds = 1, SUCCESS; }
int cudaThreadExchangeStreamCaptureMode(int *mode) { return SUCCESS; }
int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *argument) { return function(argument), SUCCESS; }

/* ------------------------------------------------------------------------------------------------ kernels: runtime */

int __cudaGetKernel(void **kernel, const void *function) { return *kernel = (void *)function, SUCCESS; }
char __cudaInitModule(void **handle) { return 1; }
int __cudaLaunchKernel() { return launched(&launch_aten_count); }
int cudaLaunchKernel() { return launched(&launch_aten_count); }
int cudaLaunchKernelExC() { return launched(&launch_aten_count); }
int cudaLaunchCooperativeKernel() { return launched(&launch_aten_count); }
int cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    *attributes = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024,
        .numRegs = 32,
        .binaryVersion = 90,
        .ptxVersion = 90,
        .maxDynamicSharedSizeBytes = 232448,
    };
    return SUCCESS;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks) { return *blocks = 8, SUCCESS; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks) { return *blocks = 8, SUCCESS; }

/* ------------------------------------------------------------- kernels: the driver, for Triton's launchers and torch */

static void *const CONTEXT = (void *)0x10;

int cuInit(unsigned flags) { return SUCCESS; }
int cuDriverGetVersion(int *version) { return *version = driver_version(), SUCCESS; }
int cuGetErrorString(int error, const char **text) { return *text = cudaGetErrorString(error), SUCCESS; }
int cuDeviceGetCount(int *count) { return *count = n_devices(), SUCCESS; }
int cuDeviceGet(int *device, int number) { return *device = number, SUCCESS; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, attribute, device); /* both number attributes alike */
}
int cuCtxGetCurrent(void **context) { return *context = CONTEXT, SUCCESS; }
int cuCtxGetDevice(int *device) { return *device = current_device, SUCCESS; }
int cuCtxGetLimit(size_t *value, int limit) { return *value = 1 << 20, SUCCESS; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = CONTEXT, SUCCESS; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, SUCCESS; }
int cuModuleLoad(void **module, const char *path) { return make_handle(module); }
int cuModuleLoadData(void **module, const void *image) { return make_handle(module); }
int cuModuleLoadDataEx(void **module) { return make_handle(module); }
int cuModuleGetFunction(void **function, void *module, const char *name) { return make_handle(function); }
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    enum { MAX_THREADS = 0, REGISTERS = 4 };
    *value = attribute == MAX_THREADS ? 1024 : attribute == REGISTERS ? 32 : 0;
    return SUCCESS;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks) { return *blocks = 8, SUCCESS; }
int cuOccupancyMaxActiveClusters(int *clusters) { return *clusters = 8, SUCCESS; }
int cuLaunchKernel() { return launched(&launch_triton_count); }
int cuLaunchKernelEx() { return launched(&launch_triton_count); }
int cuLaunchCooperativeKernel() { return launched(&launch_triton_count); }
int cuPointerGetAttribute(void *value, int attribute, unsigned long long pointer) {
    enum { MEMORY_TYPE = 2, DEVICE_MEMORY = 2 };
    *(unsigned long long *)value = attribute == MEMORY_TYPE ? DEVICE_MEMORY : pointer;
    return SUCCESS;
}
int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) { return *bytes = ALIGNMENT, SUCCESS; }

/* Torch asks the runtime for the driver's functions by name; those that are not here do nothing. */
static int do_nothing(void) { return SUCCESS; }
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                     int *status) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = do_nothing;
    if (status) *status = SUCCESS;
    return SUCCESS;
}

/* --------------------------------------------------------------------------------------------------------- cuBLAS */

#define PRODUCT(name)                                                                                                  \
    int name() { return launched(&gemm_count); }
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDotEx)
PRODUCT(cublasLtMatmul)

int cublasCreate_v2(void **handle) { return make_handle(handle); }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0, SUCCESS; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0, SUCCESS; }
int cublasLtCreate(void **handle) { return make_handle(handle); }
int cublasLtMatmulDescCreate(void **handle) { return make_handle(handle); }
int cublasLtMatmulPreferenceCreate(void **handle) { return make_handle(handle); }
int cublasLtMatrixLayoutCreate(void **handle) { return make_handle(handle); }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *description, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, char *results, int *found) {
    enum { RESULT_BYTES = 96 };
    memset(results, 0, RESULT_BYTES);
    *found = 1;
    return SUCCESS;
}

/* ----------------------------------------------------------------------------------------------------------- NCCL */

typedef struct {
    int ranks, rank;
} Communicator;
typedef struct {
    char bytes[128];
} UniqueId; /* passed by value, and so on the stack: the functions that take it must say so */

static int make_communicator(void **communicator, int ranks, int rank) {
    communicator_count++;
    Communicator *made = malloc(sizeof *made);
    *made = (Communicator){ranks, rank};
    *communicator = made;
    return SUCCESS;
}
int ncclCommInitRank(void **made, int ranks, UniqueId id, int rank) { return make_communicator(made, ranks, rank); }
int ncclCommInitRankConfig(void **made, int ranks, UniqueId id, int rank, void *config) {
    return make_communicator(made, ranks, rank);
}
int ncclCommInitRankScalable(void **made, int ranks, int rank) { return make_communicator(made, ranks, rank); }
int ncclCommSplit(Communicator *parent, int color, int key, void **made) { /* nobody says how many share the color */
    return make_communicator(made, parent->ranks, key);
}
int ncclCommCount(Communicator *communicator, int *ranks) { return *ranks = communicator->ranks, SUCCESS; }
int ncclCommUserRank(Communicator *communicator, int *rank) { return *rank = communicator->rank, SUCCESS; }
int ncclCommGetAsyncError(void *communicator, int *error) { return *error = SUCCESS; }
int ncclGetVersion(int *version) { return *version = 22809, SUCCESS; }
int ncclGetUniqueId(void *id) { return memset(id, 7, sizeof(UniqueId)), SUCCESS; }
int ncclMemAlloc(void **pointer, size_t size) { return allocate(pointer, size, DEVICE); }
int ncclMemFree(void *pointer) { return release(pointer); }
const char *ncclGetErrorString(int error) { return "no error"; }
const char *ncclGetLastError(void *communicator) { return ""; }

#define COLLECTIVE(name)                                                                                               \
    int name() { return collective_count++, SUCCESS; }
COLLECTIVE(ncclAllGather)
COLLECTIVE(ncclAllReduce)
COLLECTIVE(ncclAlltoAll)
COLLECTIVE(ncclBcast)
COLLECTIVE(ncclBroadcast)
COLLECTIVE(ncclRecv)
COLLECTIVE(ncclReduce)
COLLECTIVE(ncclReduceScatter)
COLLECTIVE(ncclSend)

/* --------------------------------------------------------------------------------- what succeeds and does nothing */

#define IGNORED(name)                                                                                                  \
    int name() { return SUCCESS; }
IGNORED(cuCtxPopCurrent)
IGNORED(cuCtxPushCurrent)
IGNORED(cuCtxSetCurrent)
IGNORED(cuCtxSetLimit)
IGNORED(cuFuncSetAttribute)
IGNORED(cuFuncSetCacheConfig)
IGNORED(cuLinkAddData_v2)
IGNORED(cuLinkComplete)
IGNORED(cuLinkCreate_v2)
IGNORED(cuModuleUnload)
IGNORED(cuTensorMapEncodeTiled)
IGNORED(cublasDestroy_v2)
IGNORED(cublasLtMatmulDescDestroy)
IGNORED(cublasLtMatmulDescSetAttribute)
IGNORED(cublasLtMatmulPreferenceDestroy)
IGNORED(cublasLtMatmulPreferenceSetAttribute)
IGNORED(cublasLtMatrixLayoutDestroy)
IGNORED(cublasLtMatrixLayoutSetAttribute)
IGNORED(cublasSetMathMode)
IGNORED(cublasSetPointerMode_v2)
IGNORED(cublasSetStream_v2)
IGNORED(cublasSetWorkspace_v2)
IGNORED(cudaDeviceEnablePeerAccess)
IGNORED(cudaDeviceGetDefaultMemPool)
IGNORED(cudaEventDestroy)
IGNORED(cudaEventQuery)
IGNORED(cudaFuncSetAttribute)
IGNORED(cudaMemPoolGetAttribute)
IGNORED(cudaMemPoolSetAccess)
IGNORED(cudaMemPoolSetAttribute)
IGNORED(cudaMemPoolTrimTo)
IGNORED(cudaProfilerStart)
IGNORED(cudaProfilerStop)
IGNORED(cudaStreamAddCallback)
IGNORED(cudaStreamDestroy)
IGNORED(cudaStreamQuery)
IGNORED(ncclCommAbort)
IGNORED(ncclCommDeregister)
IGNORED(ncclCommDestroy)
IGNORED(ncclCommFinalize)
IGNORED(ncclCommRegister)
IGNORED(ncclCommWindowDeregister)
IGNORED(ncclCommWindowRegister)
IGNORED(ncclGroupEnd)
IGNORED(ncclGroupStart)
IGNORED(ncclRedOpCreatePreMulSum)
IGNORED(ncclRedOpDestroy)
/* The library of the machine's devices, libnvidia-ml.so.1, which is this one under another name; torch asks it since 2.14
 * whether memory can be shared over NVLink between hosts. */
IGNORED(nvmlDeviceGetComputeRunningProcesses)
IGNORED(nvmlDeviceGetGpuFabricInfoV) /* leaves what the caller has set: not supported */
IGNORED(nvmlDeviceGetHandleByPciBusId_v2)
IGNORED(nvmlDeviceGetNvLinkRemoteDeviceType)
IGNORED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
IGNORED(nvmlInit_v2)
IGNORED(nvmlSystemGetCudaDriverVersion_v2)
