// The part of the CUDA runtime that a compiled kernel's host function calls: notes what it is asked
// for instead of doing it, so that launches can be tested without a GPU.
#include <pthread.h>
#include <stdint.h>
#include <string.h>

enum { CAPACITY = 1 << 16, WORDS = 8, CLUSTER_DIMENSION = 4 };

typedef struct {
    uint32_t id, padding;
    union { uint32_t dimensions[3]; char bytes[64]; } value;
} Attribute;

typedef struct {  // cudaLaunchConfig_t
    uint32_t grid[3], block[3];
    uint64_t smem, stream;
    Attribute *attributes;
    uint32_t attribute_count;
} Config;

typedef struct {
    uint32_t grid[3], block[3], cluster[3], padding;
    uint64_t smem, stream, arguments[WORDS];
    const char *name;
} Launch;

Launch launches[CAPACITY];
int launch_count, libraries_loaded, device_mask, arguments_to_read, launch_error;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int _cudaLaunchKernelEx(Config *config, void *kernel, void **arguments) {
    pthread_mutex_lock(&lock);
    Launch *launch = &launches[launch_count++ % CAPACITY];
    memset(launch, 0, sizeof *launch);
    memcpy(launch->grid, config->grid, sizeof launch->grid);
    memcpy(launch->block, config->block, sizeof launch->block);
    launch->smem = config->smem;
    launch->name = kernel;
    launch->stream = config->stream;
    for (uint32_t i = 0; i < config->attribute_count; i++)
        if (config->attributes[i].id == CLUSTER_DIMENSION)
            memcpy(launch->cluster, config->attributes[i].value.dimensions, sizeof launch->cluster);
    for (int i = 0; i < arguments_to_read; i++) launch->arguments[i] = *(uint64_t *)arguments[i];
    pthread_mutex_unlock(&lock);
    return launch_error;
}

int _cudaLaunchKernel(void *kernel) { return 999; }
int _cudaLibraryLoadData(void **library) {
    libraries_loaded++;
    *library = &lock;
    return 0;
}
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    *kernel = strdup(name);  // a kernel's handle is its name
    return 0;
}
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    device_mask |= 1 << device;
    return 0;
}
int _cuKernelGetAttribute(int *value) { return *value = 0; }
int _cudaDeviceGetAttribute(int *value) { return *value = 227 * 1024, 0; }
int _cudaGetDevice(int *device) { return *device = 0; }
int _cudaGetDeviceCount(int *count) { return *count = 8, 0; }
int _cudaFuncSetAttribute(void *kernel) { return 0; }
int _cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks) { return *blocks = 1, 0; }
